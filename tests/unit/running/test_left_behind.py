"""What tests start ends with them, even if they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.running import left_behind

# Starts what outlives it, in another session and deaf to being asked, and is killed.
_KILLED = """
import os, signal, subprocess, sys
from tests.running.left_behind import MARK, end_with_this_process
{watched}
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
for program in ("import time; print(1, flush=True); time.sleep(60)", deaf):
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid)
print(os.environ.get(MARK, ""), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="no environments are shown here")
@pytest.mark.parametrize("watched", [True, False], ids=["", "who is not watched leaves it behind"])
def test_what_is_started_ends_with_who_is_killed(watched: bool) -> None:
    program = _KILLED.format(
        watched="end_with_this_process(1.0)" if watched else f"os.environ.pop({left_behind.MARK!r}, None)"
    )
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    assert told.returncode == -signal.SIGKILL
    one, deaf, *_ = told.stdout.split("\n")
    processes = [int(one), int(deaf)]
    until = time.monotonic() + (60 if watched else 3)
    try:
        while any(map(lives, processes)) and time.monotonic() < until:
            time.sleep(0.1)
        assert [*map(lives, processes)] == [not watched] * 2
    finally:
        for process in filter(lives, processes):
            os.kill(process, signal.SIGKILL)
