"""Who owns which block: room, sharing within a tenant, eviction, nothing lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from services.verifier.kv_cache.blocks import BlockAllocator
from services.verifier.kv_cache.kept_states import KeptStates
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.target_port import Prefix
from tests.servers.service import pipeline

TEXT = list(range(3 * BLOCK + 10))


def opened(blocks: BlockAllocator, owner: str, tokens: list[int], tenant: str | None = "t") -> int | None:
    """Open, and compute everything."""
    shared = blocks.open(owner, len(tokens), tokens, tenant)
    if shared is not None:
        blocks.seal(owner, tokens)
    return shared


def test_room_is_given_and_taken_back() -> None:
    blocks = BlockAllocator(4)
    assert blocks.open("a", 2 * BLOCK + 1) == 0
    assert blocks.blocks_of("a") == [0, 1, 2]
    assert blocks.open("b", BLOCK + 1) is None
    assert blocks.available == 1
    assert blocks.grow("a", 3 * BLOCK) == []
    assert blocks.grow("a", 4 * BLOCK) == [3]
    assert blocks.grow("a", 5 * BLOCK) is None
    with pytest.raises(ValueError, match="already"):
        blocks.open("a", 1)
    blocks.release("a")
    blocks.release("a")
    assert blocks.available == 4


def test_a_tenant_shares_what_its_requests_begin_with() -> None:
    blocks = BlockAllocator(12)
    assert opened(blocks, "a", TEXT) == 0
    assert opened(blocks, "b", [*TEXT[: 2 * BLOCK], 7, 7, 7]) == 2
    assert blocks.blocks_of("b")[:2] == blocks.blocks_of("a")[:2]
    assert blocks.blocks_of("b")[2] != blocks.blocks_of("a")[2]
    # The last token's logits are wanted, so its block is computed.
    assert opened(blocks, "c", TEXT[: 2 * BLOCK]) == 1
    blocks.release("a")
    assert opened(blocks, "d", TEXT) == 3
    for owner in "bcd":
        blocks.release(owner)
    assert blocks.available == 12
    assert opened(blocks, "e", TEXT) == 3


def test_never_across_tenants_nor_without_one() -> None:
    blocks = BlockAllocator(20)
    opened(blocks, "a", TEXT, "one")
    assert opened(blocks, "b", TEXT, "two") == 0
    assert opened(blocks, "c", TEXT, None) == 0
    assert opened(blocks, "d", TEXT, None) == 0
    assert not set(blocks.blocks_of("a")) & set(blocks.blocks_of("b"))


def test_never_across_salts_and_all_of_them_are_forgotten() -> None:
    blocks = BlockAllocator(30)
    last = [*TEXT, 1]
    assert blocks.open("a", len(last), last, "one", salt="x") == 0
    blocks.seal("a", last)
    assert blocks.open("b", len(last), last, "one", salt="y") == 0
    assert blocks.open("c", len(last), last, "one") == 0
    assert blocks.open("d", len(last), last, "two", salt="x") == 0
    assert blocks.open("e", len(last), last, "one", salt="x") == 3
    blocks.release("a")
    blocks.forget("one")
    assert blocks.open("f", len(last), last, "one", salt="x") == 0


def test_what_was_computed_for_a_tenant_can_be_forgotten() -> None:
    blocks = BlockAllocator(20)
    opened(blocks, "idle", TEXT, "one")
    blocks.release("idle")
    opened(blocks, "running", [8, *TEXT], "one")
    opened(blocks, "other", TEXT, "two")
    blocks.forget("one")
    assert blocks.cached == 0
    assert opened(blocks, "a", TEXT, "one") == 0
    # One that is under way leaves nothing behind either.
    blocks.seal("running", [8, *TEXT, *TEXT])
    blocks.release("running")
    assert opened(blocks, "b", [8, *TEXT], "one") == 0
    assert opened(blocks, "c", TEXT, "two") == 3
    for owner in ("a", "b", "c", "other"):
        blocks.release(owner)
    assert blocks.available == 20


def test_a_block_in_the_middle_is_not_enough() -> None:
    blocks = BlockAllocator(20)
    opened(blocks, "a", TEXT)
    assert opened(blocks, "b", [1, *TEXT[1:]]) == 0


def test_what_has_been_idle_for_longest_goes_first_and_ends_before_beginnings() -> None:
    blocks = BlockAllocator(7)
    opened(blocks, "old", TEXT[: 2 * BLOCK])
    opened(blocks, "new", [5] * 2 * BLOCK)
    blocks.release("old")
    blocks.release("new")
    assert blocks.cached == 4
    blocks.open("x", 4 * BLOCK)
    blocks.release("x")
    # One block had to go: the end of the old text.
    assert blocks.cached == 3
    assert opened(blocks, "a", [*TEXT[: 2 * BLOCK], 1]) == 1
    blocks.release("a")
    assert opened(blocks, "b", [*[5] * 2 * BLOCK, 1]) == 2


def test_any_order_of_requests_loses_no_block() -> None:
    source = random.Random(0)
    blocks = BlockAllocator(16)
    living: dict[str, list[int]] = {}
    for number in range(2000):
        if living and source.random() < 0.5:
            owner = source.choice(list(living))
            if source.random() < 0.5:
                blocks.release(owner)
                del living[owner]
            else:
                more = living[owner] + [source.randrange(2)] * source.randrange(100)
                if blocks.grow(owner, len(more)) is not None:
                    blocks.seal(owner, more)
                    living[owner] = more
        else:
            text = [source.randrange(2)] * source.randrange(1, 300)
            if opened(blocks, str(number), text, source.choice("ab")) is not None:
                living[str(number)] = text
        used = {block for owner in living for block in blocks.blocks_of(owner)}
        assert len(used) + blocks.available == 16
        assert all(len(blocks.blocks_of(owner)) * BLOCK >= len(text) for owner, text in living.items())
    for owner in living:
        blocks.release(owner)
    assert blocks.available == 16


def stepped(blocks: BlockAllocator, owner: str, tokens: list[int], tenant: str | None = "t") -> tuple[int, list[int]]:
    """Open, and compute everything in one pass. Returns the blocks shared, and after how many tokens states are kept."""
    shared = blocks.open(owner, len(tokens), tokens, tenant)
    assert shared is not None
    saved = blocks.save_states(owner, len(tokens))
    blocks.seal(owner, tokens)
    return shared, [length for length, _ in saved]


def test_a_prefix_is_shared_up_to_a_kept_state() -> None:
    blocks = BlockAllocator(24, KeptStates(4, 2 * BLOCK))
    long = list(range(5 * BLOCK + 1))
    assert stepped(blocks, "a", long) == (0, [2 * BLOCK, 4 * BLOCK])
    assert stepped(blocks, "b", long) == (4, [])
    # It is computed again from the border on, beside what is there.
    assert blocks.blocks_of("b")[:4] == blocks.blocks_of("a")[:4]
    assert blocks.blocks_of("b")[4] != blocks.blocks_of("a")[4]
    # The block with its last token is not shared, and what is kept twice is given back.
    assert stepped(blocks, "c", long[: 4 * BLOCK]) == (2, [4 * BLOCK])
    assert stepped(blocks, "d", [7, *long]) == (0, [2 * BLOCK, 4 * BLOCK])
    # All four are kept for texts in use.
    assert stepped(blocks, "e", [8, *long]) == (0, [])


def test_a_state_is_shared_after_its_pass_alone() -> None:
    blocks = BlockAllocator(20, KeptStates(1, BLOCK))
    blocks.open("a", len(TEXT), TEXT, "t")
    assert blocks.save_states("a", BLOCK + 5) == [(BLOCK, 0)]
    assert blocks.open("b", len(TEXT), TEXT, "t") == 0
    # One that ends in mid-pass leaves nothing behind, and takes nothing away.
    blocks.release("a")
    assert blocks.save_states("b", BLOCK) == [(BLOCK, 0)]
    blocks.seal("b", TEXT[:BLOCK])
    assert blocks.open("c", len(TEXT), TEXT, "t") == 1
    blocks.release("b")
    blocks.release("c")
    blocks.forget("t")
    assert blocks.open("d", len(TEXT), TEXT, "t") == 0
    assert blocks.save_states("d", BLOCK) == [(BLOCK, 0)]


def test_the_state_idle_for_longest_gives_way() -> None:
    blocks = BlockAllocator(20, KeptStates(2, BLOCK))
    for owner, token in (("a", 1), ("b", 2), ("c", 3)):
        stepped(blocks, owner, [token] * (BLOCK + 1))
        blocks.release(owner)
    assert [blocks.open(owner, BLOCK + 1, [token] * (BLOCK + 1), "t") for owner, token in (("d", 1), ("e", 2), ("f", 3))] == [
        0, 1, 1
    ]  # fmt: skip


def test_any_order_of_requests_loses_no_slot() -> None:
    source = random.Random(0)
    kept = KeptStates(6, 2 * BLOCK)
    blocks = BlockAllocator(24, kept)
    living: dict[str, list[int]] = {}
    # What a slot holds: the text up to its border.
    held: dict[int, tuple[int, ...]] = {}
    begun = 0
    for number in range(3000):
        action = source.random()
        if living and action < 0.3:
            owner = source.choice([*living])
            blocks.release(owner)
            del living[owner]
        elif living and action < 0.6:
            owner = source.choice([*living])
            more = living[owner] + [source.randrange(2)] * source.randrange(1, 200)
            if blocks.grow(owner, len(more)) is not None:
                held |= {slot: tuple(more[:length]) for length, slot in blocks.save_states(owner, len(more))}
                blocks.seal(owner, more)
                living[owner] = more
        elif action < 0.62:
            blocks.forget(source.choice("ab"))
        else:
            text = [source.randrange(2)] * source.randrange(1, 400)
            if (shared := blocks.open(str(number), len(text), text, source.choice("ab"))) is None:
                continue
            living[str(number)] = text
            start = blocks.state_at_start(str(number))
            assert (start is not None) == (shared > 0)
            if start is not None:
                begun += 1
                assert held[start] == tuple(text[: shared * BLOCK])
            held |= {slot: tuple(text[:length]) for length, slot in blocks.save_states(str(number), len(text))}
            blocks.seal(str(number), text)
    assert begun > 100
    for owner in living:
        blocks.release(owner)
    blocks.forget_all()
    assert sorted(kept._free) == list(range(6))


async def say(running: object, tenant: str | None, prompt: list[int], salt: str = "") -> list[int]:
    request = ClientRequest(
        input=tuple(prompt),
        sampling=RequestedSampling(max_tokens=30, ignore_eos=True, temperature=1.0, seed=4),
        strategy="prompt_lookup",
        tenant=tenant,
        cache_salt=salt,
    )
    events = running.router.generate(request)  # type: ignore[attr-defined]
    return [token async for event in events if isinstance(event, TextChunk) for token in event.token_ids]


@pytest.mark.examples(2)
@pytest.mark.parametrize("caching", [True, False])
async def test_sharing_changes_no_token(tiny_model: Path, caching: bool) -> None:
    long = [5, 6, 7, 8, 9] * 40
    async with pipeline(tiny_model, f"verifier.enable_prefix_caching={caching}") as running:
        stats = running.verifier.loop.stats
        first = await say(running, "a", long)
        assert stats.prompt_tokens_cached == 0
        assert await say(running, "b", long) == first
        assert stats.prompt_tokens_cached == 0
        assert await say(running, "a", long) == first
        assert stats.prompt_tokens_cached == (3 * BLOCK if caching else 0)
        # What was answered is shared as well, by a conversation that goes on.
        onward = [*long, *first, 5, 6]
        before = stats.prompt_tokens_cached
        told = await say(running, "a", onward)
        assert stats.prompt_tokens_cached - before == (3 * BLOCK if caching else 0)
        assert told == await say(running, "fresh", onward)


async def test_salts_share_nothing_and_change_no_token(tiny_model: Path) -> None:
    long = [5, 6, 7, 8, 9] * 40
    async with pipeline(tiny_model) as running:
        stats = running.verifier.loop.stats
        answers = [await say(running, "a", long, salt) for salt in ("", "one", "two", "one", "")]
        assert len({tuple(answer) for answer in answers}) == 1
        assert stats.prompt_tokens_cached == 2 * 3 * BLOCK


async def test_who_says_no_tenant_shares_with_nobody(tiny_model: Path) -> None:
    assert Prefix(tokens=(1,)).tenant is None
    assert ClientRequest(input="x", sampling=RequestedSampling()).tenant is None
    long = [5, 6, 7, 8, 9] * 40
    async with pipeline(tiny_model) as running:
        stats, blocks = running.verifier.loop.stats, running.verifier.loop._target.blocks
        first = await say(running, None, long)
        assert await say(running, None, long) == first
        assert (stats.prompt_tokens_cached, blocks.cached) == (0, 0)
        # Those who call without a key are one tenant, whose name is empty: a service without keys has one user.
        assert await say(running, "", long) == first
        assert stats.prompt_tokens_cached == 0
        assert await say(running, "", long) == first
        assert stats.prompt_tokens_cached == 3 * BLOCK
        assert await say(running, None, long) == first
        assert stats.prompt_tokens_cached == 3 * BLOCK


async def test_a_small_cache_makes_requests_step_back_and_changes_no_token(tiny_model: Path) -> None:
    # Prompt and answer alone need two blocks, and there are three.
    prompts = [[40 + number, 41, 42] * 15 for number in range(6)]
    async with pipeline(tiny_model) as running:
        wanted = [await say(running, "a", prompt) for prompt in prompts]
    flags = ["verifier.kv_cache_tokens=192", "verifier.max_model_len=128", "verifier.max_nodes=16"]
    async with pipeline(tiny_model, *flags) as running:
        assert await asyncio.gather(*(say(running, "a", prompt) for prompt in prompts)) == wanted
        assert running.verifier.loop.stats.preemptions > 0
        card = await running.verifier.describe()
        assert card.free_blocks == card.total_blocks
