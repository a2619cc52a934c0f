"""A worker process that crashes, hangs, chatters or refuses is reported as such, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.bench.child_process import WorkerProcess
from benchmarks.bench.records import ContestantFailed
from tests.running.patience import PATIENCE_S
from tests.running.processes import is_worker

PEER = """
import os, sys, time
from multiprocessing import shared_memory

class Peer:
    def __init__(self, spec):
        if spec.get("refuses"):
            raise ValueError("no such model")
        self.runs = 0

    def versions(self):
        return {"fake": "1"}

    def run(self, contestant, load):
        self.runs += 1
        print("chatter on stdout", flush=True)
        if load == "crash":
            print("about to die", file=sys.stderr, flush=True)
            os._exit(7)
        if load == "hang":
            time.sleep(600)
        if load == "share":
            self.shared = shared_memory.SharedMemory(create=True, size=2**20)
            return {"shared": self.shared.name}
        if load == "fail":
            raise RuntimeError("out of luck")
        return {"runs": self.runs, "pid": os.getpid()}

    def close(self):
        pass
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    (tmp_path / "peer_fake.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "logs" / "fake.log"
    made = WorkerProcess(Path(sys.executable), "peer_fake", {"threads": 1}, log, timeout_s=PATIENCE_S)
    yield made
    made.kill()


def run(worker: WorkerProcess, what: str) -> dict[str, int]:
    return worker.order({"do": "run", "contestant": "fake", "load": what})


def test_it_answers_and_stands_still_in_between(worker: WorkerProcess) -> None:
    first = run(worker, "ok")
    process, deadline = psutil.Process(first["pid"]), time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_STOPPED:
        # A signal takes its time to arrive.
        assert time.monotonic() < deadline, "it never stopped"
        time.sleep(0.01)
    assert run(worker, "ok") == {"runs": 2, "pid": first["pid"]}
    assert worker.versions == {"fake": "1"}
    assert worker.peak_memory_bytes > 2**20
    worker.close()
    assert not psutil.pid_exists(first["pid"])


def test_a_crash_is_reported_and_the_next_order_starts_anew(worker: WorkerProcess) -> None:
    first = run(worker, "ok")
    with pytest.raises(ContestantFailed, match="exit code 7: about to die"):
        run(worker, "crash")
    again = run(worker, "ok")
    assert again["runs"] == 1
    assert again["pid"] != first["pid"]
    worker.close()


def test_a_hang_is_reported_and_killed(worker: WorkerProcess) -> None:
    pid = run(worker, "ok")["pid"]
    worker._timeout_s = 1.0
    with pytest.raises(ContestantFailed, match="no answer within 1 s"):
        run(worker, "hang")
    assert not psutil.pid_exists(pid)


def test_shared_memory_of_a_killed_process_is_removed(worker: WorkerProcess) -> None:
    # Whoever answers is stopped, the tracker with it.
    name = str(run(worker, "share")["shared"])
    segment, deadline = Path("/dev/shm") / name, time.monotonic() + PATIENCE_S
    assert segment.is_file() or not segment.parent.is_dir()
    worker.kill()
    while segment.exists():
        assert time.monotonic() < deadline, "it was left behind"
        time.sleep(0.05)


def test_an_error_is_reported_and_the_process_lives(worker: WorkerProcess) -> None:
    pid = run(worker, "ok")["pid"]
    with pytest.raises(ContestantFailed, match="RuntimeError: out of luck"):
        run(worker, "fail")
    assert run(worker, "ok")["pid"] == pid
    worker.close()


def test_a_model_that_cannot_be_loaded(tmp_path: Path, worker: WorkerProcess) -> None:
    worker._spec["refuses"] = True
    with pytest.raises(ContestantFailed, match="ValueError: no such model"):
        worker.load()
    worker.close()
    assert "no such model" in (tmp_path / "logs" / "fake.log").read_text()
    assert not [child for child in psutil.Process(os.getpid()).children() if is_worker(child)]
