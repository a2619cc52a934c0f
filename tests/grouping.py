"""Sends the test files of one group (``xdist_group``) to one process.

xdist's own ``loadgroup`` writes the group into an attribute of tests that pytest 9.2 no longer has, and so groups nothing.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

_GROUP = re.compile(r'xdist_group\("([^"]+)"\)')


class GroupScheduling(LoadScopeScheduling):
    """Tests one by one, but those of a group's files together."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(Path(self.config.rootpath, nodeid.partition("::")[0])) or nodeid


@cache
def _group_of(file: Path) -> str | None:
    named = set(_GROUP.findall(file.read_text(encoding="utf-8")))
    assert len(named) <= 1, f"{file} names several groups: a file is in one at most"
    return named.pop() if named else None
