"""``outrider`` in a process of its own. Within the tests' process it is the fixture ``outrider_here``, which starts in no time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import main

# Two threads that wait actively for each other stand still on a busy machine.
ONE_THREAD = ["--set", "verifier.threads=1"]
SMALL = ["--set", "verifier.max_model_len=512", "--set", "verifier.kv_cache_tokens=4096", *ONE_THREAD]


def outrider(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end: exit code and output."""
    command = [str(Path(sys.executable).parent / "outrider"), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, input=stdin, env=environment, check=False)


def run_here(*arguments: str) -> int:
    """Run it in this process, for fixtures that many tests share; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["outrider", *arguments])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)
