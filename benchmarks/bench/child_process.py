"""A worker process: sends orders, receives replies within a time limit, keeps a log and measures memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench.records import ContestantFailed
from cluster.process.starting import as_it_was

OUR_PEER = "peer_outrider"
_WORKER = Path(__file__).parents[1] / "peers" / "worker.py"
# Loading may compile kernels, which takes vLLM minutes on a small CPU.
_LOAD_TIMEOUT_S = 900.0
_CLOSE_TIMEOUT_S = 20.0
_EXEC_TIMEOUT_S = 5.0


class WorkerProcess:
    """A process that starts with its first order, restarts after it has died, and is stopped between orders.

    An engine that waits for requests may spin on the cores on which another one is measured. Therefore an idle worker is
    stopped with SIGSTOP. ``rests=False`` exempts a process that would take the pause for the death of its parts.

    Attributes:
        versions: packages and their versions, once loaded.
        peak_memory_bytes: highest resident memory so far, summed over its processes.
    """

    def __init__(
        self, python: Path, module: str, spec: dict[str, Any], log: Path, timeout_s: float, *, rests: bool = True
    ) -> None:
        self.versions: dict[str, str] = {}
        self.peak_memory_bytes = 0
        self._command = [str(python), str(_WORKER), module]
        self._spec = spec
        self._log = log
        self._timeout_s = timeout_s
        self._rests = rests
        self._ours = module == OUR_PEER
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()

    def load(self) -> None:
        """Start the process and load the model, unless it is running.

        Raises:
            ContestantFailed: the model could not be loaded.
        """
        if self._process is not None and self._process.poll() is None:
            return
        # Clean up after a process that has died.
        self.kill()
        threads = str(self._spec["threads"])
        # Other engines wait as they do where nobody compares them.
        environment = (dict(os.environ) if self._ours else as_it_was(os.environ)) | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            # In its own session, Ctrl-C does not reach the process, and it can be killed with all its children.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._replies = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._replies), daemon=True).start()
        try:
            self.versions = self._ask({"do": "load", "spec": self._spec}, _LOAD_TIMEOUT_S)
        except ContestantFailed:
            # Without a model it cannot answer the next order.
            self.kill()
            raise
        self._rest()

    def order(self, order: dict[str, Any], requests: int = 1) -> dict[str, Any]:
        """Send an order and wait for the reply, ``timeout_s`` for each of its ``requests``.

        Raises:
            ContestantFailed: the worker crashed, hung, or reported an error.
        """
        self.load()
        self._signal(signal.SIGCONT)
        reply: dict[str, Any] = self._ask(order, self._timeout_s * requests)
        self.peak_memory_bytes = max(self.peak_memory_bytes, sum(_most_resident(member) for member in self._members()))
        self._rest()
        return reply

    def close(self) -> None:
        """Ask the process to end; kill it if it does not."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all its children."""
        if self._process is None:
            return
        members = {*self._members(), *_group(self._process.pid)}
        # Python's resource trackers end by themselves after all others, and remove the shared memory left behind.
        trackers = {member for member in members if _is_tracker(member)}
        _send(trackers, signal.SIGCONT)
        _send(members - trackers, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _ask(self, order: dict[str, Any], timeout_s: float) -> Any:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            why = "(--timeout a request)" if order["do"] != "load" else "to the order to load its model"
            raise ContestantFailed(f"hung: no answer within {timeout_s:g} s {why}; log: {self._log}") from None
        except OSError:
            line = None
        except BaseException:
            # A late reply would be taken for the reply to the next order.
            self.kill()
            raise
        if line is None:
            code = self._process.wait()
            self.kill()
            raise ContestantFailed(f"crashed with exit code {code}: {_last_line(self._log)}; log: {self._log}")
        reply = json.loads(line)
        if "error" in reply:
            raise ContestantFailed(f"{reply['error']}; log: {self._log}")
        return reply["ok"]

    def _members(self) -> list[psutil.Process]:
        """The process and its descendants."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _rest(self) -> None:
        if self._rests:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        _send(self._members(), number)


def _read(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    replies.put(None)


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _group(leader: int) -> Iterator[psutil.Process]:
    """Processes that are still in its group, including children whose parent has crashed."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                yield process


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        deadline = time.monotonic() + _EXEC_TIMEOUT_S
        # A process that a loaded machine has not let run its program yet shows no arguments.
        while not (arguments := process.cmdline()) and time.monotonic() < deadline:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            time.sleep(0.01)
        return any("multiprocessing.resource_tracker" in argument for argument in arguments)
    return False


def _most_resident(process: psutil.Process) -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Only Linux records the high-water mark; elsewhere the current value is used.
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "its log is empty"
