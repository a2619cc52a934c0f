"""Which cases of a test stand for all of them in `make test`; `make test-all` runs every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def examples(cases: Iterable[Any], every: int) -> list[ParameterSet]:
    """The first of every so many cases as they are, the others marked ``exhaustive``.

    >>> [len(case.marks) for case in examples("abcd", 3)]
    [0, 1, 1, 0]
    """
    made = []
    for at, case in enumerate(cases):
        given = case if isinstance(case, ParameterSet) else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        marks = given.marks if at % every == 0 else (*given.marks, pytest.mark.exhaustive)
        made.append(pytest.param(*given.values, marks=marks, id=given.id))
    return made
