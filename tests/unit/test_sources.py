"""Suffix and recycling: what they propose, what they learn, what they forget, and who never sees it."""

from __future__ import annotations

import random

import pytest

from services.drafter.config import RecyclingConfig, SuffixConfig
from services.drafter.recycling import Recycling
from services.drafter.suffix import Suffix, SuffixSession
from speculation.messages import OpenSession, StepReport
from speculation.tree import chain, path_to, validate
from speculation.types import Observation, TokenTree


def opening(tokens: list[int], tenant: str = "t", prompt_length: int | None = None) -> OpenSession:
    length = len(tokens) if prompt_length is None else prompt_length
    return OpenSession(session_id="s", tokens=tuple(tokens), prompt_length=length, sources=(), max_nodes=8, tenant=tenant)


def report(*committed: int, observation: Observation | None = None) -> StepReport:
    return StepReport(
        session_id="s", committed=committed, length=0, prefix_hash=0, accepted_path=(), max_nodes=8, observation=observation
    )


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    validate(tree, vocab_size=10**6, max_nodes=512)
    assert all(score <= tree.scores[parent] for score, parent in zip(tree.scores, tree.parents, strict=True) if parent != -1)
    return [tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(len(tree))]


def suffix(**config: int) -> Suffix:
    return Suffix(SuffixConfig(**config))


def test_suffix_follows_what_came_most_often() -> None:
    text = [1, 2, 50, 1, 2, 60, 1, 2, 60, 9, 1, 2]
    tree = suffix().open(opening(text)).draft(8)
    found = paths(tree)
    assert found[0] == (60,)
    assert (50,) in found
    assert (60, 1) in found
    assert tree.scores[found.index((60,))] > tree.scores[found.index((50,))]


def test_suffix_trusts_longer_endings_more() -> None:
    # 3 follows 2 twice, but after 8, 2 it was 4.
    text = [1, 2, 3, 1, 2, 3, 8, 2, 4, 7, 8, 2]
    assert paths(suffix().open(opening(text)).draft(1)) == [(4,)]


def test_suffix_joins_late_and_learns_on() -> None:
    text = [random.Random(1).randrange(5) for _ in range(200)]
    late, early = suffix().open(opening(text)), suffix().open(opening(text[:50], prompt_length=50))
    for token in text[50:]:
        early.observe(report(token))
    assert early.draft(12) == late.draft(12)


def test_nothing_known_nothing_proposed() -> None:
    assert len(suffix().open(opening([1, 2, 3])).draft(8)) == 0
    assert len(suffix().open(opening([1, 1, 1])).draft(0)) == 0


def answer(source: Suffix, tenant: str, tokens: list[int]) -> None:
    session = source.open(opening([100, 101], tenant))
    session.observe(report(*tokens))
    session.close()


def test_answers_are_kept_only_where_it_is_asked_for() -> None:
    for kept in (0, 1000):
        source = suffix(max_cached_tokens=kept)
        answer(source, "t", [5, 6, 7, 8, 9])
        found = paths(source.open(opening([1, 5, 6])).draft(3))
        assert found == ([(7,), (7, 8), (7, 8, 9)] if kept else [])


def test_no_tenant_sees_anothers_answers() -> None:
    source = suffix(max_cached_tokens=1000)
    answer(source, "one", [5, 6, 7, 8, 9])
    assert len(source.open(opening([1, 5, 6], "two")).draft(3)) == 0
    assert len(source.open(opening([1, 5, 6], "one")).draft(3)) == 3


def test_old_answers_make_room_for_new_ones() -> None:
    source = suffix(max_cached_tokens=10)
    answer(source, "t", [5, 6, 7, 8, 9])
    answer(source, "t", [20, 21, 22, 23, 24])
    answer(source, "t", [30, 31, 32, 33, 34])
    assert len(source.open(opening([1, 5, 6])).draft(3)) == 0
    assert len(source.open(opening([1, 20, 21])).draft(3)) == 3
    assert len(source.open(opening([1, 30, 31])).draft(3)) == 3


def test_a_store_that_is_emptied_holds_nothing() -> None:
    source = suffix(max_cached_tokens=50, depth=6)
    numbers = random.Random(3)
    for _ in range(200):
        answer(source, "t", [numbers.randrange(4) for _ in range(numbers.randint(1, 60))])
    (trie,) = source._tries.values()
    counted = sum(node.count for node in trie.root.next.values())
    assert 0 < counted <= 50
    while trie._texts:
        trie._count(trie._texts.popleft(), -1)
    assert not trie.root.next


def test_tenants_that_are_idle_for_longest_are_forgotten() -> None:
    source = suffix(max_cached_tokens=100, max_tenants=2)
    for tenant in ("a", "b", "c"):
        answer(source, tenant, [5, 6, 7])
    assert len(source.open(opening([5, 6], "c")).draft(3)) == 1
    assert len(source.open(opening([5, 6], "a")).draft(3)) == 0


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_a_session_counts_every_stretch(depth: int) -> None:
    text = [random.Random(2).randrange(3) for _ in range(60)]
    session = suffix(depth=depth).open(opening(text))
    assert isinstance(session, SuffixSession)
    for length in range(1, depth + 1):
        for start in range(len(text) - length + 1):
            node = session._own
            for token in text[start : start + length]:
                node = node.next[token]
            stretch = text[start : start + length]
            assert node.count == sum(text[i : i + length] == stretch for i in range(len(text) - length + 1))


def test_recycling_follows_what_the_target_held_likely() -> None:
    source = Recycling(RecyclingConfig())
    session = source.open(opening([1, 2]))
    seen = Observation(tree=chain([3, 9], "x"), top_ids=((3, 4), (5, 6), (7, 8)))
    session.observe(report(3, 5, observation=seen))
    # After 2 came 3 or 4, after 3 5 or 6, after the rejected 9 7 or 8; nothing is known of 5.
    assert len(session.draft(4)) == 0
    found = paths(source.open(opening([1, 2])).draft(6))
    assert found[:3] == [(3,), (3, 5), (4,)]
    assert (3, 6) in found
    assert paths(source.open(opening([9])).draft(2)) == [(7,), (8,)]


def test_recycling_begins_with_the_prompts_own_pairs() -> None:
    session = Recycling(RecyclingConfig()).open(opening([1, 2, 3, 1]))
    assert paths(session.draft(2)) == [(2,), (2, 3)]


def test_recycling_without_observations_learns_what_was_committed() -> None:
    session = Recycling(RecyclingConfig()).open(opening([1]))
    session.observe(report(2, 1))
    session.observe(report(3, 1))
    assert paths(session.draft(4))[:2] == [(3,), (3, 1)]
    assert (2,) in paths(session.draft(4))


def test_recycling_keeps_tenants_apart() -> None:
    source = Recycling(RecyclingConfig(max_tenants=2))
    source.open(opening([1, 2, 1], "one"))
    assert len(source.open(opening([1], "two")).draft(4)) == 0
    assert len(source.open(opening([1], "one")).draft(4)) > 0
    source.open(opening([1], "three"))
    assert len(source.open(opening([1], "two")).draft(4)) == 0
