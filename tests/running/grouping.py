"""Shares the test files out between processes: a file, or all files of one group (``xdist_group``), is one piece of work.

A file in two processes would make its fixtures twice. The longest pieces begin first, by the seconds in docs/test_durations.txt: the
short ones fill up what is left at the end. Where time may be too short for all (tests/running/time_left.py), a third of them, another one from
commit to commit, goes before the others.

xdist's own ``loadgroup`` writes the group into an attribute of tests that pytest 9.2 no longer has, and so groups nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.running import time_left

_GROUP = re.compile(r'xdist_group\("([^"]+)"\)')
DURATIONS = Path("docs", "test_durations.txt")
# A line: seconds and the test's name, which is cut off where a line of 150 letters ends.
_DURATION = re.compile(r"^ *([0-9.]+)  (tests/.+)$", re.MULTILINE)
_CUT = 140
# Of a test that is in no line: those have less than 0.2.
_SHORT_S = 0.05
# As many runs, each with another turn, begin with everything once.
TURNS = 3


class GroupScheduling(LoadScopeScheduling):
    """File by file, and the files of a group together; the longest begin."""

    _ordered = False

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _group_of(Path(self.config.rootpath, file)) or file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._ordered:
            self._ordered, known = True, _durations(Path(self.config.rootpath, DURATIONS))
            scopes = sorted(self.workqueue, key=lambda scope: -seconds_of(self.workqueue[scope], known))
            if os.environ.get(time_left.VARIABLE):
                scopes = in_turn(scopes, turn_of(self.config.rootpath))
                self.config.stash[time_left.BEGAN] = scopes[0]
            for scope in scopes:
                self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)


def in_turn(longest_first: Sequence[str], turn: int) -> list[str]:
    """Pieces dealt like cards into hands of about the same seconds, and played hand by hand, the longest of each first.

    Each begins in one of ``TURNS`` turns; and the last hand, too, ends with short ones, so that no process is long alone.
    """
    return [scope for hand in range(TURNS) for scope in longest_first[(turn + hand) % TURNS :: TURNS]]


def turn_of(root: Path) -> int:
    """A number that differs from commit to commit; where there is no git, from day to day."""
    try:
        told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return datetime.now(UTC).toordinal()
    return int(told.stdout, 16)


def seconds_of(tests: Iterable[str], known: dict[str, float]) -> float:
    """About how long these tests take, by ``known`` ones."""
    return sum(known.get(nodeid[:_CUT].rstrip(), _SHORT_S) for nodeid in tests)


@cache
def _durations(file: Path) -> dict[str, float]:
    return {test[:_CUT].rstrip(): float(seconds) for seconds, test in _DURATION.findall(file.read_text(encoding="utf-8"))}


@cache
def _group_of(file: Path) -> str | None:
    named = set(_GROUP.findall(file.read_text(encoding="utf-8")))
    assert len(named) <= 1, f"{file} names several groups: a file is in one at most"
    return named.pop() if named else None
