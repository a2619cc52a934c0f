"""Lets the suites of tests/lossless run over ranks and stages, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lossless.suites import LAID_OUT, OF_ONE_PROCESS, ONE_PROCESS, OTHERS, SOME_REFUSED


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


@pytest.fixture(scope="module", autouse=True)
def target_layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """Over what the targets of a test are laid out. Fixtures of a module that make some name it."""
    name: str = getattr(request, "param", ONE_PROCESS)
    if name == ONE_PROCESS:
        yield name
        return
    # It imports the target, which tests of one process need not.
    from tests.layouts import LAYOUTS, laid_out

    with laid_out(LAYOUTS[name], skips=LAID_OUT[_suite(request.module.__name__)] == SOME_REFUSED):
        yield name
