"""What is printed where the terminal takes little or nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_PRINTS = """
import sys
from cluster.process.terminal import prepare_streams, tell
prepare_streams()
sys.stdout.write("Größe 東京")
sys.stdout.flush()
tell("naïve")
"""


def run(redirect: str, encoding: str) -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, _PRINTS]
    env = {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)


def test_a_terminal_without_the_characters_gets_their_numbers() -> None:
    done = run("", "ascii")
    assert (done.returncode, done.stdout) == (0, rb"Gr\xf6\xdfe \u6771\u4eac")
    assert rb"na\xefve" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_take_nothing(redirect: str) -> None:
    done = run(redirect, "utf-8")
    assert done.returncode == 0 and b"Traceback" not in done.stderr
