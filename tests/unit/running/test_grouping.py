"""A file's tests go to one process, those of a group's files too, whatever pytest and xdist make of marks; the longest begin."""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.running import grouping, time_left
from tests.running.grouping import DURATIONS, TURNS, GroupScheduling, in_turn, seconds_of, turn_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scheduling() -> GroupScheduling:
    made = GroupScheduling.__new__(GroupScheduling)
    made.config = SimpleNamespace(rootpath=ROOT)
    return made


def test_a_file_is_one_piece_of_work_and_so_is_a_group(scheduling: GroupScheduling) -> None:
    scope = scheduling._split_scope
    assert (
        scope("tests/unit/speculation/test_tree.py::test_chain[1]")
        == scope("tests/unit/speculation/test_tree.py::test_x")
        == "tests/unit/speculation/test_tree.py"
    )
    assert scope("tests/unit/training/test_training_data.py::test_one") == "training data"
    rays = [f"{file.relative_to(ROOT)}::test_one" for file in (ROOT / "tests/e2e").glob("test_*on_ray.py")]
    assert len(rays) >= 5
    assert {scope(nodeid) for nodeid in (*rays, "tests/k8s/test_deployed.py::test_one")} == {"ray"}


def given_out(scheduling: GroupScheduling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of three files, of which b's tests take longest and c's are the shortest."""
    (tmp_path / "docs").mkdir()
    (tmp_path / DURATIONS).write_text("Seconds\n\n   123.4  tests/b.py::test_long[a b]\n     0.5  tests/c.py::test_one\n")
    scheduling.config = SimpleNamespace(rootpath=tmp_path, stash=pytest.Stash())
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
    return given


def test_the_longest_begins(scheduling: GroupScheduling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(time_left.VARIABLE, raising=False)
    # Forty that nothing is known of take longer than one of half a second.
    assert given_out(scheduling, tmp_path, monkeypatch) == ["b", "a", "c"]


def test_where_time_may_be_short_another_one_begins_each_time(
    scheduling: GroupScheduling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(time_left.VARIABLE, "1")
    monkeypatch.setattr(grouping, "turn_of", lambda root: 7)
    assert given_out(scheduling, tmp_path, monkeypatch) == ["a", "c", "b"]
    assert scheduling.config.stash[time_left.BEGAN] == "a"


def test_each_begins_in_one_of_as_many_runs_and_the_longest_of_a_hand_first() -> None:
    pieces = [f"{seconds:03d}" for seconds in range(100, 0, -1)]
    begin = []
    for turn in range(5, 5 + TURNS):
        order = in_turn(pieces, turn)
        assert sorted(order) == sorted(pieces)
        first = order[: len(pieces) // TURNS]
        assert first == sorted(first, reverse=True)
        # About a third of all seconds, and what comes last is short.
        assert sum(map(int, first)) == pytest.approx(sum(map(int, pieces)) / TURNS, rel=0.05)
        assert int(order[-1]) <= TURNS
        begin += first
    assert set(begin) >= set(pieces[:-TURNS])


def test_the_turn_is_the_commits_or_the_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"{'ab' * 20}\n"))
    assert turn_of(tmp_path) == int("ab" * 20, 16)

    def without_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(grouping.subprocess, "run", without_git)
    assert turn_of(tmp_path) == datetime.now(UTC).toordinal()


def test_durations_are_found_by_the_names_of_tests() -> None:
    known = grouping._durations(ROOT / DURATIONS)
    assert len(known) > 1000
    profile = "tests/k8s/test_deployed.py::test_each_profile_answers_as_plain_decoding_does[cpu-demo]"
    assert seconds_of([profile], known) > 5
    # A line ends before a long name does.
    shown = max(known, key=len)
    assert seconds_of([shown + "-and more"], known) == known[shown] or len(shown) < grouping._CUT
