"""A file's tests go to one process, those of a group's files too, whatever pytest and xdist make of marks; the longest begin."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.grouping import DURATIONS, GroupScheduling, seconds_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scheduling() -> GroupScheduling:
    made = GroupScheduling.__new__(GroupScheduling)
    made.config = SimpleNamespace(rootpath=ROOT)
    return made


def test_a_file_is_one_piece_of_work_and_so_is_a_group(scheduling: GroupScheduling) -> None:
    scope = scheduling._split_scope
    assert (
        scope("tests/unit/test_tree.py::test_chain[1]")
        == scope("tests/unit/test_tree.py::test_x")
        == "tests/unit/test_tree.py"
    )
    assert scope("tests/unit/test_training_data.py::test_one") == "training data"
    rays = [f"{file.relative_to(ROOT)}::test_one" for file in (ROOT / "tests/e2e").glob("test_*on_ray.py")]
    assert len(rays) >= 5
    assert {scope(nodeid) for nodeid in (*rays, "tests/k8s/test_deployed.py::test_one")} == {"ray"}


def test_the_longest_begins(scheduling: GroupScheduling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / DURATIONS).write_text("Seconds\n\n   123.4  tests/b.py::test_long[a b]\n     0.5  tests/c.py::test_one\n")
    scheduling.config = SimpleNamespace(rootpath=tmp_path)
    scheduling.workqueue = OrderedDict(
        {
            "a": {f"tests/a.py::test_{n}": False for n in range(40)},
            "b": {"tests/b.py::test_long[a b]": False},
            "c": {"tests/c.py::test_one": False},
        }
    )
    given: list[str] = []
    take = lambda self, node: given.append(self.workqueue.popitem(last=False)[0])  # noqa: E731
    monkeypatch.setattr(LoadScopeScheduling, "_assign_work_unit", take)
    for _ in range(3):
        scheduling._assign_work_unit(SimpleNamespace())  # type: ignore[arg-type]
    # Forty that nothing is known of take longer than one of half a second.
    assert given == ["b", "a", "c"]


def test_durations_are_found_by_the_names_of_tests() -> None:
    from tests import grouping

    known = grouping._durations(ROOT / DURATIONS)
    assert len(known) > 1000
    profile = "tests/k8s/test_deployed.py::test_each_profile_answers_as_plain_decoding_does[cpu-demo]"
    assert seconds_of([profile], known) > 5
    # A line ends before a long name does.
    shown = max(known, key=len)
    assert seconds_of([shown + "-and more"], known) == known[shown] or len(shown) < grouping._CUT
