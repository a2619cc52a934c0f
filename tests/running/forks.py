"""Processes that are forked from one which has imported PyTorch, transformers and this repository.

A process that is started anew computes for two to six seconds before it does anything: it imports. Here that is paid once for all
processes of a test run. What they do, and what one can do to them (signals, limits, an end at any moment), is the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
from multiprocessing.context import ForkServerContext

import psutil

# One for all: of several lists the last one would count. What is imported may start no thread.
_PRELOADED = (
    "services.verifier.stages.process",
    "services.drafter.service",
    "services.router.service",
    "services.verifier.service",
    "cluster.entry.public",
    "services.links.grpc_draft",
    "transformers.models.llama.modeling_llama",
    "benchmarks.soak.component",
    "tests.engine.fakes",
    "tests.running.forks",
)
CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(_PRELOADED))
STARTED: list[psutil.Process] = []


def running_forks() -> list[psutil.Process]:
    """Those of ``STARTED`` that run, in the order in which they were started."""
    return [each for each in STARTED if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _end() -> None:
    """A test that fails may leave one frozen, and ``multiprocessing`` would wait for it at the end for ever."""
    for each in running_forks():
        each.kill()


# After multiprocessing's own, and so run before it.
atexit.register(_end)
