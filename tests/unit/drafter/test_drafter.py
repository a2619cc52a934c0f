"""Prompt lookup proposes what it should, forgets what it must, and joins late."""

from __future__ import annotations

from services.drafter.config import DrafterConfig, PromptLookupConfig
from services.drafter.service import DrafterService
from services.drafter.sources.prompt_lookup import PromptLookup
from speculation.messages import CloseSession, Draft, DraftFailure, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import path_to, validate
from speculation.types import TokenTree


def opening(tokens: list[int], nodes: int = 4, name: str = "s") -> OpenSession:
    return OpenSession(
        session_id=name, tokens=tuple(tokens), prompt_length=len(tokens), sources=("prompt_lookup",), max_nodes=nodes
    )


def lookup(tokens: list[int], nodes: int = 4, **config: int) -> TokenTree:
    tree = PromptLookup(PromptLookupConfig(**config)).open(opening(tokens)).draft(nodes)
    validate(tree, vocab_size=10**6, max_nodes=nodes)
    return tree


def leaves(tree: TokenTree) -> set[tuple[int, ...]]:
    inner = set(tree.parents)
    return {tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(len(tree)) if node not in inner}


def test_the_longest_match_wins() -> None:
    text = [7, 1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]
    assert leaves(lookup(text, 1, max_branches=1)) == {(50,)}


def test_the_latest_of_equal_matches_wins() -> None:
    assert leaves(lookup([2, 3, 50, 2, 3, 60, 2, 3], 1, prompt_lookup_max=2, max_branches=1)) == {(60,)}


def test_several_matches_become_branches() -> None:
    tree = lookup([2, 3, 50, 51, 2, 3, 60, 61, 2, 3], 4, prompt_lookup_max=2, max_branches=2)
    assert {path[0] for path in leaves(tree)} == {50, 60}


def test_equal_beginnings_share_nodes() -> None:
    tree = lookup([2, 3, 50, 51, 2, 3, 50, 61, 2, 3], 8, prompt_lookup_max=2, max_branches=2)
    assert [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1] == [50]
    assert {path[:2] for path in leaves(tree)} == {(50, 51), (50, 61)}


def test_no_match_no_tree() -> None:
    assert len(lookup([1, 2, 3, 4])) == 0
    assert len(lookup([1])) == 0
    assert len(lookup([1, 1, 1], 0)) == 0
    assert len(lookup([1, 2, 1], prompt_lookup_min=2)) == 0


def test_a_repeating_token_drafts_itself() -> None:
    assert set(lookup([5, 5, 5, 5, 5, 5, 5], 3).tokens) == {5}


def test_step_by_step_equals_all_at_once() -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 9, 1, 2]
    source = PromptLookup(PromptLookupConfig())
    late = source.open(opening(text)).draft(6)
    early = source.open(opening(text[:3]))
    for token in text[3:]:
        early.observe(StepReport(session_id="s", committed=(token,), length=0, prefix_hash=0, accepted_path=(), max_nodes=6))
    assert early.draft(6) == late


def step(tokens: list[int], committed: list[int]) -> StepReport:
    return StepReport(
        session_id="s",
        committed=tuple(committed),
        length=len(tokens) + len(committed),
        prefix_hash=extend_hash(EMPTY_HASH, [*tokens, *committed]),
        accepted_path=(),
        max_nodes=4,
    )


async def test_drafts_say_what_they_grow_from() -> None:
    service, text = DrafterService(DrafterConfig()), [1, 2, 3, 1, 2]
    first = await service.open(opening(text))
    assert isinstance(first, Draft)
    assert (first.base_length, first.base_hash) == (5, extend_hash(EMPTY_HASH, text))
    second = await service.step(step(text, [3, 1]))
    assert isinstance(second, Draft)
    assert (second.base_length, second.base_hash) == (7, extend_hash(EMPTY_HASH, [*text, 3, 1]))


async def test_a_missed_step_is_noticed_and_the_session_forgotten() -> None:
    service, text = DrafterService(DrafterConfig()), [1, 2, 3]
    await service.open(opening(text))
    reply = await service.step(step([*text, 9], [3]))
    assert isinstance(reply, DraftFailure)
    assert reply.reopen
    assert service.sessions == 0


async def test_close_forgets_and_the_oldest_make_room() -> None:
    service = DrafterService(DrafterConfig(max_sessions=3))
    for index in range(5):
        await service.open(opening([1, 2], name=f"s{index}"))
    assert service.sessions == 3
    for index in range(5):
        service.close(CloseSession(session_id=f"s{index}"))
    assert service.sessions == 0
