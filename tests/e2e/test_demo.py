"""``make demo`` runs through, and no token differs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.exhaustive
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_the_demo_ends_well() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"COLUMNS": "120"}
    command = [sys.executable, "-m", "cli.demo"]
    ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "leaked" not in ran.stderr
    # No progress bar of a library.
    assert "%|" not in ran.stderr + ran.stdout
    assert "0 of 98 tokens differ" in ran.stdout
    assert "was killed in mid-answer" in ran.stdout
    answers = [line.split("│") for line in ran.stdout.splitlines() if line.startswith("│ ") and line.count("│") == 7]
    assert [row[1].strip() for row in answers] == [
        "edit",
        "open question",
        "hostile drafter",
        "verifier killed",
    ]
    assert all(row[6].strip() == "0" for row in answers)
    # The model does what it is asked.
    assert "class Pile:" in ran.stdout
