"""Lets the suites of tests/lossless run over ranks and stages, too (``suites``)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.lossless.suites import LAID_OUT, OF_ONE_PROCESS, ONE_PROCESS, OTHERS, SOME_REFUSED

# "all": every case runs over every layout, not one in three.
_VARIABLE = "LAYOUTS_UNDER_TEST"


def _suite(module: str) -> str:
    return module.rpartition(".")[2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case for each layout. Those of one process keep their names."""
    suite = _suite(metafunc.module.__name__)
    test = f"{suite}::{metafunc.definition.originalname}"
    if suite not in LAID_OUT or any(test in named for named in OF_ONE_PROCESS.values()):
        return
    others = [pytest.param(name, marks=pytest.mark.exhaustive, id=name) for name in OTHERS]
    metafunc.parametrize("target_layout", [pytest.param(ONE_PROCESS, id=pytest.HIDDEN_PARAM), *others], indirect=True)


def _layout_of(item: pytest.Item) -> str:
    callspec: pytest.CallSpec | None = getattr(item, "callspec", None)  # type: ignore[name-defined]
    found: str = ONE_PROCESS if callspec is None else callspec.params.get("target_layout", ONE_PROCESS)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the cases of a test that has three or more take the layouts in turns."""
    if os.environ.get(_VARIABLE) == "all":
        return
    laid_out = [item for item in items if _layout_of(item) in OTHERS]
    cases = Counter((_test_of(item), _layout_of(item)) for item in laid_out)
    seen: Counter[tuple[str, str]] = Counter()
    left_out = set()
    for item in laid_out:
        layout = _layout_of(item)
        key = _test_of(item), layout
        if cases[key] >= len(OTHERS) and (seen[key] - OTHERS.index(layout)) % len(OTHERS):
            left_out.add(item)
        seen[key] += 1
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture(scope="module", autouse=True)
def target_layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """Over what the targets of a test are laid out. Fixtures of a module that make some name it."""
    name: str = getattr(request, "param", ONE_PROCESS)
    if name == ONE_PROCESS:
        yield name
        return
    # It imports the target, which tests of one process need not.
    from tests.engine.layouts import LAYOUTS, laid_out

    with laid_out(LAYOUTS[name], skips=LAID_OUT[_suite(request.module.__name__)] == SOME_REFUSED):
        yield name
