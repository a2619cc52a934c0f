"""Processes that are forked from one which has imported PyTorch, transformers and this repository.

A process that is started anew computes for two to six seconds before it does anything: it imports. Here that is paid once for all
processes of a test run. What they do, and what one can do to them (signals, limits, an end at any moment), is the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil

# One for all: of several lists the last one would count. What is imported may start no thread.
_PRELOADED = (
    "services.verifier.stages.process",
    "services.verifier.service",
    "services.drafter.service",
    "services.router.service",
    "services.links.grpc_draft",
    "services.links.grpc_verifier",
    "cluster.public_entry",
    "benchmarks.soak.component",
    "transformers.models.llama.modeling_llama",
    "tests.fakes",
    "tests.forks",
)
CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(_PRELOADED))
STARTED: list[psutil.Process] = []


def running_forks() -> list[psutil.Process]:
    """Those of ``STARTED`` that run, in the order in which they were started."""
    return [each for each in STARTED if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


class ForkedModule:
    """What ``python -m MODULE ARGUMENTS`` runs, in a session of its own; with the methods of ``subprocess.Popen``.

    Args:
        log: a file to which what it says on stderr is appended; None: ours.
    """

    def __init__(self, module: str, *arguments: str, log: Path | None = None) -> None:
        (its_input, own_output), (own_input, its_output) = os.pipe(), os.pipe()
        ends = [Connection(its_input, writable=False), Connection(its_output, readable=False)]
        if log is not None:
            ends.append(Connection(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), readable=False))
        self.stdin, self.stdout = open(own_output, "w"), open(own_input)  # noqa: SIM115
        self._process = CONTEXT.Process(target=_run, args=(module, arguments, dict(os.environ), ends), daemon=True)
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        STARTED.append(psutil.Process(self.pid))

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], ends: list[Connection]) -> None:
    os.setsid()
    # The environment of the process that forks is that of the first test which needed it.
    os.environ.clear()
    os.environ.update(environment)
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    # multiprocessing has put nothing in its place.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [module, *arguments]
    # Anew, as a program's own module.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end() -> None:
    """A test that fails may leave one frozen, and ``multiprocessing`` would wait for it at the end for ever."""
    for each in running_forks():
        each.kill()


# After multiprocessing's own, and so run before it.
atexit.register(_end)


def begin_forked(module: str, argument: str, log: Path | None) -> ForkedModule:
    """Implements ``benchmarks.soak.component_process.Begin``."""
    return ForkedModule(module, argument, log=log)
