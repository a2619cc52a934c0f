"""Leaves out what a slow machine has no time for.

Where ``TESTS_END_AT`` is set (seconds since 1970), tests marked ``exhaustive`` that would begin later are skipped, and named at
the end. Only `.ci/run` sets it: its time is bounded, and machines differ by a factor of two. `make test-all` leaves nothing out.
What begins turns with the commit (tests/running/grouping.py), so that over several runs everything is run.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

VARIABLE = "TESTS_END_AT"
# The file, or the group of files, that began first.
BEGAN = pytest.StashKey[str]()
_REASON = f"no time is left ({VARIABLE})"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which it is too late."""
    end = os.environ.get(VARIABLE)
    if end and time.time() > float(end) and item.get_closest_marker("exhaustive"):
        pytest.skip(_REASON)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What began, and how many tests of which file were left out."""
    if (began := terminalreporter.config.stash.get(BEGAN, None)) is not None:
        terminalreporter.section(f"of the exhaustive tests, {began} began")
    skipped = terminalreporter.stats.get("skipped", ())
    files = Counter(report.nodeid.partition("::")[0] for report in skipped if _REASON in str(report.longrepr))
    if files:
        terminalreporter.section(f"left out, since no time was left: {files.total()} tests")
        for file, tests in sorted(files.items()):
            terminalreporter.line(f"{tests:5d}  {file}")
