"""What a slow machine has no time for is left out, named, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = """
import pytest

def test_ordinary():
    pass

@pytest.mark.exhaustive
def test_long():
    pass
"""


@pytest.mark.parametrize(("end", "outcome"), [("1", "1 passed, 1 skipped"), ("9e9", "2 passed"), ("", "2 passed")])
def test_exhaustive_tests_after_the_end(end: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.running.time_left", "-p", "no:schemathesis", str(tmp_path)],
        env={**os.environ, "TESTS_END_AT": end, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome in run.stdout
    assert ("left out, since no time was left: 1 tests" in run.stdout) == ("skipped" in outcome)
