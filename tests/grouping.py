"""Shares the test files out between processes: a file, or all files of one group (``xdist_group``), is one piece of work.

A file in two processes would make its fixtures twice. The longest pieces begin first, by the seconds in docs/test_durations.txt: the
short ones fill up what is left at the end.

xdist's own ``loadgroup`` writes the group into an attribute of tests that pytest 9.2 no longer has, and so groups nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_GROUP = re.compile(r'xdist_group\("([^"]+)"\)')
DURATIONS = Path("docs", "test_durations.txt")
# A line: seconds and the test's name, which is cut off where a line of 150 letters ends.
_DURATION = re.compile(r"^ *([0-9.]+)  (tests/.+)$", re.MULTILINE)
_CUT = 140
# Of a test that is in no line: those have less than 0.2.
_SHORT_S = 0.05


class GroupScheduling(LoadScopeScheduling):
    """File by file, and the files of a group together; the longest begin."""

    _ordered = False

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _group_of(Path(self.config.rootpath, file)) or file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._ordered:
            self._ordered, known = True, _durations(Path(self.config.rootpath, DURATIONS))
            for scope in sorted(self.workqueue, key=lambda scope: -seconds_of(self.workqueue[scope], known)):
                self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)


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
