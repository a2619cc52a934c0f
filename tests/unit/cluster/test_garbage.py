"""How a process that serves looks for garbage."""

import gc

import pytest

from cluster.process import starting
from cluster.process.starting import begin_serving, end_serving


def looks() -> int:
    """How often new objects were looked through."""
    return int(gc.get_stats()[0]["collections"])


@pytest.mark.exhaustive
def test_objects_of_a_few_steps_are_not_looked_through_but_garbage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers that nothing else sets, whatever the process of the tests did before.
    usual = (701, 11, 11)
    monkeypatch.setattr(starting, "_USUAL", usual)
    begin_serving()
    try:
        assert gc.get_freeze_count() > 0
        before = looks()
        held: list[list[object]] = [[] for _ in range(10_000)]
        assert looks() == before
        for each in held:
            each.append(each)
        held = [[] for _ in range(30_000)]
        assert looks() > before
    finally:
        end_serving()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (usual, 0)
