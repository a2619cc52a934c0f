"""Test files of one group go to one process, whatever pytest and xdist make of their marks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.grouping import GroupScheduling

ROOT = Path(__file__).parents[2]


def test_a_group_is_one_scope_and_other_tests_are_each_their_own() -> None:
    scheduling = GroupScheduling.__new__(GroupScheduling)
    scheduling.config = SimpleNamespace(rootpath=ROOT)

    def scope(nodeid: str) -> str:
        return scheduling._split_scope(nodeid)

    own = "tests/unit/test_tree.py::test_chain[1]"
    assert scope(own) == own
    assert scope("tests/unit/test_training_data.py::test_one") == "training data"
    rays = [f"{file.relative_to(ROOT)}::test_one" for file in (ROOT / "tests/e2e").glob("test_*on_ray.py")]
    assert len(rays) >= 5
    assert {scope(nodeid) for nodeid in (*rays, "tests/k8s/test_deployed.py::test_one")} == {"ray"}
