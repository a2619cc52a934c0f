"""Suffix and recycling: what they propose, what they learn, what they forget, and who never sees it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.drafter.config import RecyclingConfig, SuffixConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.sources.interfaces import PathSession
from services.drafter.sources.recycling import Recycling
from services.drafter.sources.suffix import Suffix, SuffixSession
from speculation import successor_table as successors
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import chain, path_to, validate
from speculation.types import Observation, TokenTree
from tests.running.refusals import refuses


def opening(tokens: list[int], tenant: str | None = "t", prompt_length: int | None = None) -> OpenSession:
    length = len(tokens) if prompt_length is None else prompt_length
    return OpenSession(session_id="s", tokens=tuple(tokens), prompt_length=length, sources=(), max_nodes=8, tenant=tenant)


def report(*committed: int, observation: Observation | None = None, accepted: tuple[int, ...] = ()) -> StepReport:
    return StepReport(
        session_id="s",
        committed=committed,
        length=0,
        prefix_hash=0,
        accepted_path=accepted,
        max_nodes=8,
        observation=observation,
    )


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    validate(tree, vocab_size=10**6, max_nodes=512)
    assert all(score <= tree.scores[parent] for score, parent in zip(tree.scores, tree.parents, strict=True) if parent != -1)
    return [tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(len(tree))]


def suffix(**config: int) -> Suffix:
    return Suffix(SuffixConfig(**config))


def draft(session: PathSession, nodes: int) -> TokenTree:
    """What the source alone would draft, with what is believed of its kinds at first."""
    return BlendSession({"x": session}, Calibrator(Suffix.prior | Recycling.prior)).draft(nodes)


def test_suffix_follows_what_came_most_often() -> None:
    text = [1, 2, 50, 1, 2, 60, 1, 2, 60, 9, 1, 2]
    tree = draft(suffix().open(opening(text)), 8)
    found = paths(tree)
    assert found[0] == (60,)
    assert (50,) in found
    assert (60, 1) in found
    assert tree.scores[found.index((60,))] > tree.scores[found.index((50,))]


def test_suffix_trusts_longer_endings_more() -> None:
    # 3 follows 2 twice, but after 8, 2 it was 4.
    text = [1, 2, 3, 1, 2, 3, 8, 2, 4, 7, 8, 2]
    assert paths(draft(suffix().open(opening(text)), 1)) == [(4,)]


def test_suffix_joins_late_and_learns_on() -> None:
    text = [random.Random(1).randrange(5) for _ in range(200)]
    late, early = suffix().open(opening(text)), suffix().open(opening(text[:50], prompt_length=50))
    for token in text[50:]:
        early.observe(report(token))
    assert draft(early, 12) == draft(late, 12)


def test_nothing_known_nothing_proposed() -> None:
    assert len(draft(suffix().open(opening([1, 2, 3])), 8)) == 0
    assert len(draft(suffix().open(opening([1, 1, 1])), 0)) == 0


def answer(source: Suffix, tenant: str, tokens: list[int]) -> None:
    session = source.open(opening([100, 101], tenant))
    session.observe(report(*tokens))
    session.close()


def test_answers_are_kept_only_where_it_is_asked_for() -> None:
    for kept in (0, 1000):
        source = suffix(max_cached_tokens=kept)
        answer(source, "t", [5, 6, 7, 8, 9])
        found = paths(draft(source.open(opening([1, 5, 6])), 3))
        assert found == ([(7,), (7, 8), (7, 8, 9)] if kept else [])


def test_no_tenant_sees_anothers_answers() -> None:
    source = suffix(max_cached_tokens=1000)
    answer(source, "one", [5, 6, 7, 8, 9])
    assert len(draft(source.open(opening([1, 5, 6], "two")), 3)) == 0
    assert len(draft(source.open(opening([1, 5, 6], "one")), 3)) == 3


def test_old_answers_make_room_for_new_ones() -> None:
    source = suffix(max_cached_tokens=10)
    answer(source, "t", [5, 6, 7, 8, 9])
    answer(source, "t", [20, 21, 22, 23, 24])
    answer(source, "t", [30, 31, 32, 33, 34])
    assert len(draft(source.open(opening([1, 5, 6])), 3)) == 0
    assert len(draft(source.open(opening([1, 20, 21])), 3)) == 3
    assert len(draft(source.open(opening([1, 30, 31])), 3)) == 3


def test_a_store_that_is_emptied_holds_nothing() -> None:
    source = suffix(max_cached_tokens=50, depth=6)
    numbers = random.Random(3)
    for _ in range(200):
        answer(source, "t", [numbers.randrange(4) for _ in range(numbers.randint(1, 60))])
    (answers,) = source._answers.values()
    assert 0 < sum(count for _, count, _ in answers.memory.automaton.followers(0)) <= 50
    answers._texts.clear()
    answers.memory.forget(answers.memory.end)
    assert answers.memory.automaton.states == 1


def test_answers_grow_old() -> None:
    now = [0.0]
    source = Suffix(SuffixConfig(max_cached_tokens=1000, cached_s=60), clock=lambda: now[0])
    answer(source, "t", [5, 6, 7, 8, 9])
    now[0] = 59.0
    assert len(draft(source.open(opening([1, 5, 6])), 3)) == 3
    now[0] = 61.0
    assert len(draft(source.open(opening([1, 5, 6])), 3)) == 0
    answer(source, "t", [5, 6, 7, 8, 9])
    now[0] = 200.0
    # A tenant that has gone quiet is not remembered for longer.
    source.open(opening([1, 5, 6], "another"))
    assert source._answers["t", ""].memory.automaton.states == 1


def test_answers_side_by_side_draft_from_each_other() -> None:
    def beside(source: Suffix, group: str = "g", tenant: str | None = None) -> SuffixSession:
        return source.open(replace(opening([1, 2], tenant), group=group))

    def follows(session: SuffixSession, path: list[int]) -> list[int]:
        place: Any = session.start()
        for token in path:
            place = session.follow(place, token) if place is not None else None
        return [] if place is None else [token for token, _ in session.candidates(place)]

    written = list(range(100, 140))
    for kept in (0, 1000):
        source = Suffix(SuffixConfig(max_cached_tokens=kept))
        one, other, stranger, elsewhere = beside(source), beside(source), beside(source, "h"), beside(source, "g", "else")
        for begin in range(0, 40, 8):
            one.observe(report(*written[begin : begin + 8]))
        assert follows(other, written[:30]) == [130]
        # Each piece is told with what stands before it.
        assert [follows(other, written[:length]) for length in range(39)] == [[token] for token in written[:32]] + [[]] * 7
        one.close()
        assert [follows(other, written[:length])[0] for length in range(39)] == written[:39]
        assert not follows(stranger, written[:3]) and not follows(elsewhere, written[:3])
        other.close()
        del one, other
        assert set(source._groups) == {(None, "", "h"), ("else", "", "g")}


def test_tenants_that_are_idle_for_longest_are_forgotten() -> None:
    source = suffix(max_cached_tokens=100, max_tenants=2)
    for tenant in ("a", "b", "c"):
        answer(source, tenant, [5, 6, 7])
    assert len(draft(source.open(opening([5, 6], "c")), 3)) == 1
    assert len(draft(source.open(opening([5, 6], "a")), 3)) == 0


def test_recycling_follows_what_the_target_held_likely() -> None:
    source = Recycling(RecyclingConfig())
    session = source.open(opening([1, 2]))
    seen = Observation(tree=chain([3, 9], "x"), top_ids=((3, 4), (5, 6), (7, 8)))
    session.observe(report(3, 5, observation=seen, accepted=(0,)))
    # After 2 came 3 or 4, after 3 5 or 6, after the rejected 9 7 or 8; of 5 only what was likely in its place and before it.
    assert paths(draft(session, 4)) == [(6,), (4,)]
    found = paths(draft(source.open(opening([1, 2])), 6))
    assert found[:3] == [(3,), (3, 5), (4,)]
    assert (3, 6) in found
    assert paths(draft(source.open(opening([9])), 2)) == [(7,), (8,)]


def test_recycling_begins_with_the_prompts_own_pairs() -> None:
    session = Recycling(RecyclingConfig()).open(opening([1, 2, 3, 1]))
    assert paths(draft(session, 2)) == [(2,), (2, 3)]


def test_recycling_without_observations_learns_what_was_committed() -> None:
    session = Recycling(RecyclingConfig()).open(opening([1]))
    session.observe(report(2, 1))
    session.observe(report(3, 1))
    # The last word counts.
    assert paths(draft(session, 2)) == [(3,), (3, 1)]


def test_recycling_keeps_tenants_apart() -> None:
    source = Recycling(RecyclingConfig(max_tenants=2))
    source.open(opening([1, 2, 1], "one"))
    assert len(draft(source.open(opening([1], "two")), 4)) == 0
    assert len(draft(source.open(opening([1], "one")), 4)) > 0
    source.open(opening([1], "three"))
    assert len(draft(source.open(opening([1], "two")), 4)) == 0


def test_what_one_adapter_answered_is_not_drafted_for_another() -> None:
    answers, table = suffix(max_cached_tokens=100), Recycling(RecyclingConfig())
    for source in (answers, table):
        for adapter in ("", "one", "two"):
            assert len(draft(source.open(replace(opening([1], "t"), adapter=adapter)), 4)) == 0
            source.open(replace(opening([1, 2, 3, 1, 2], "t", prompt_length=1), adapter=adapter)).close()
            assert paths(draft(source.open(replace(opening([1], "t"), adapter=adapter)), 1)) == [(2,)]
        # All of them are the tenant's.
        source.forget("t")
        for adapter in ("", "one", "two"):
            assert len(draft(source.open(replace(opening([1], "t"), adapter=adapter)), 4)) == 0


def test_a_tenant_can_be_forgotten_with_its_requests_under_way() -> None:
    answers, table = suffix(max_cached_tokens=100), Recycling(RecyclingConfig())
    for source in (answers, table):
        for tenant in ("one", "two"):
            source.open(opening([1, 2, 3, 1, 2], tenant, prompt_length=1)).close()
        under_way = source.open(opening([1, 2, 3, 1, 2], "one", prompt_length=1))
        source.forget("one")
        under_way.observe(report(3, 1))
        under_way.close()
        source.forget("nobody")
        assert paths(draft(under_way, 1)) == [(2,)]
        assert len(draft(source.open(opening([1], "one")), 4)) == 0
        assert paths(draft(source.open(opening([1], "two")), 1)) == [(2,)]


def test_who_says_no_tenant_leaves_nothing_behind() -> None:
    assert OpenSession(session_id="s", tokens=(1,), prompt_length=1, sources=(), max_nodes=8).tenant is None
    answers, table = suffix(max_cached_tokens=100), Recycling(RecyclingConfig())
    for source in (answers, table):
        for _ in range(2):
            assert len(draft(source.open(opening([1], None)), 4)) == 0
            session = source.open(opening([1, 2, 3, 1, 2], None, prompt_length=1))
            assert paths(draft(session, 1)) == [(3,)]
            session.close()
        assert len(draft(source.open(opening([1], "")), 4)) == 0
    assert list(answers._answers) == list(table._tables) == [("", "")]


def test_longer_contexts_are_asked_first() -> None:
    session = Recycling(RecyclingConfig()).open(opening([7, 2]))
    session.observe(report(9, observation=Observation(tree=TokenTree(), top_ids=((3, 4),))))
    session.observe(report(7, 1, 2, observation=Observation(tree=chain([7, 1, 2], "x"), top_ids=((0,), (0,), (0,), (8, 3)))))
    # After 2 the last word was 8; after 7, 2 it was 3.
    assert paths(draft(session, 1)) == [(8,)]
    session.observe(report(7, 2))
    assert paths(draft(session, 1)) == [(3,)]


def test_a_table_drops_what_it_learnt_longest_ago() -> None:
    source = Recycling(RecyclingConfig(max_entries=3))
    session = source.open(opening([1]))
    for token in range(2, 30):
        session.observe(report(token, observation=Observation(top_ids=((token,),))))
    table = source._tables["t", ""]
    # Three entries are those of the last context alone: of its last one, two and three tokens.
    assert [token for token in range(30) if table.top((token,))] == [28]
    assert [token for token in range(30) if table.seen((token,)) is not None] == [28]


def test_a_snapshot_is_what_recycling_begins_with(tmp_path: Path) -> None:
    table = successors.empty(10, 2)
    table[4] = (5, 6)
    successors.write(tmp_path / "s", table)
    source = Recycling(RecyclingConfig(), warm=successors.read(tmp_path / "s"))
    assert paths(draft(source.open(opening([4])), 2)) == [(5,), (6,)]
    assert len(draft(source.open(opening([3])), 2)) == 0
    assert len(draft(source.open(opening([11])), 2)) == 0


@pytest.mark.parametrize("damage", ["cut", "mark", "id", "gone"])
def test_a_damaged_snapshot_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "s"
    successors.write(file, successors.empty(10, 2))
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[:-1]
    elif damage == "mark":
        content[0] ^= 1
    elif damage == "id":
        content[-4:] = (10).to_bytes(4, "little")
    file.write_bytes(content)
    if damage == "gone":
        file.unlink()
    with refuses(ConfigurationError, file):
        successors.read(file)
