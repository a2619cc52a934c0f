"""Tree attention in Triton: values against float64, and equal bits however rows are packed, by a model of Hopper's products.

Mostly in float32, since rounding to bfloat16 hides most differences.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from services.verifier.attention.calls import TILE, Bias, Call
from services.verifier.kernels.triton import pass_meta, tree_pass
from services.verifier.kernels.triton.pass_shape import GpuAttentionSizes, PassShape
from services.verifier.kernels.triton.tree_pass import TritonPass, refusal
from services.verifier.kernels.triton.virtual_groups import GROUP, Pack, VirtualGroup, pack
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from tests.kernels.triton_interpreter import hopper

pytestmark = pytest.mark.exhaustive

SEGMENT = 512


def a_call(share: int = 3, size: int = 64, kv_heads: int = 1, **settings: Any) -> Call:
    call = Call(entry=0, heads=kv_heads * share, kv_heads=kv_heads, key_size=size, value_size=size, scale=size**-0.5)
    return replace(call, **settings)


class Text:
    """A text of random queries, keys and values, whose rows a pass computes in any packing."""

    def __init__(
        self, call: Call, length: int, dtype: torch.dtype = torch.float32, group: int = GROUP, whole_rows: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.call, self._group = call, group
        # One more, so that padding rows have something.
        self.query, self.key, self.value = (
            torch.randn(heads, length + 1, size, generator=generator).to(dtype)
            for heads, size in (
                (call.heads, call.key_size),
                (call.kv_heads, call.key_size),
                (call.kv_heads, call.value_size),
            )
        )
        self.length = length
        self.pool = KVPool(
            [call], rows=4 * (length + 2 * TILE), dtype=dtype, device=torch.device("cpu"), whole_rows=whole_rows
        )
        self._sizes = GpuAttentionSizes.of([call], self.pool.device)
        self._free = list(range(self.pool.total_blocks))
        random.Random(0).shuffle(self._free)

    def open(self, name: str, context: int) -> None:
        """A request whose first ``context`` positions are committed, in scattered tiles."""
        count = -(-(self.length + TILE) // TILE)
        tiles, self._free = self._free[:count], self._free[count:]
        self.pool.assign(name, tiles, count)
        for start in range(0, context, TILE):
            end = min(context, start + TILE)
            tile = tiles[start // TILE]
            self.pool.keys[0][tile][:, :, : end - start] = self.key[:, start:end].transpose(1, 2)
            self.pool.values[0][tile][:, : end - start, : self.call.value_size] = self.value[:, start:end]

    def close(self, *names: str) -> None:
        for name in names:
            self._free += self.pool.blocks_of(name)
            self.pool.forget(name)

    def shape(self, batch: Sequence[Rows], rows: int) -> PassShape:
        return PassShape.of(batch, self._sizes, rows)

    def run(
        self,
        batch: Sequence[Rows],
        shown: Sequence[int],
        rows: int | None = None,
        pack: Pack = pack,
        split: bool | None = None,
    ) -> torch.Tensor:
        """A pass whose rows have the queries, keys and values of the places ``shown`` of the text.

        Args:
            split: whether segments are computed apart; None: as the shape says.
        """
        count = rows or len(shown)
        shape = self.shape(batch, count)
        if split is not None:
            shape = replace(shape, split=split, parts=99 * count)
        laid_out = TritonPass(self.pool, shape, pack=pack)
        laid_out.fill(batch)
        places = [*shown, *[self.length] * (count - len(shown))]
        with hopper(self._group):
            return laid_out.attend(self.call, self.query[:, places], self.key[:, places], self.value[:, places])

    def alone(self, positions: Iterable[int]) -> torch.Tensor:
        """Plain decoding: every position in a pass of its own."""
        made = []
        for position in positions:
            self.open("alone", position)
            made.append(self.run([rows_of("alone", position, 1)], [position])[0])
            self.close("alone")
        return torch.stack(made)

    def expected(self, position: int) -> torch.Tensor:
        """[heads, value size], float64."""
        call = self.call
        slots = torch.arange(position + 1)
        scores = self.query[:, position].double()[:, None] @ self.key.double()[:, : position + 1].repeat_interleave(
            call.share, 0
        ).transpose(1, 2)
        scores = call.capped(scores * call.scale)[:, 0]
        unseen = call.unseen(torch.tensor([position])[:, None], slots[None])
        if unseen is not None:
            scores = scores.masked_fill(unseen, float("-inf"))
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : position + 1]
        return (weights[:, None] @ self.value.double()[:, : position + 1].repeat_interleave(call.share, 0))[:, 0]


def rows_of(name: str, context: int, count: int, parents: Sequence[int] = ()) -> Rows:
    return Rows(request_id=name, context=context, tokens=(0,) * count, parents=tuple(parents), logits=1)


def bushy(depth: int, source: random.Random, others: int) -> tuple[list[int], list[int]]:
    """Parents of a tree around a path of ``depth`` nodes, and the path."""
    parents: list[int] = []
    path: list[int] = []
    for _ in range(depth):
        for _ in range(source.randint(0, others)):
            parents.append(source.randint(-1, len(parents) - 1))
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
    return parents, path


def tree_in(text: Text, start: int, depth: int, seed: int, others: int = 2) -> tuple[Rows, list[int], list[int]]:
    """A tree behind position ``start`` of request "tree": its rows, what of the text they show, and the path's rows."""
    source = random.Random(seed)
    parents, path = bushy(depth, source, others)
    shown = [start, *(source.randrange(text.length) for _ in parents)]
    for index, node in enumerate(path):
        shown[1 + node] = start + 1 + index
    return rows_of("tree", start, len(shown), parents), shown, [0, *(1 + node for node in path)]


def bits_in_every_packing(text: Text) -> torch.Tensor:
    """Checks rows across a border of tiles: alone, in a chunk, and in a tree beside another request and padding.

    Returns:
        Those of the chunk, which is the whole text of 76 positions.
    """
    some = [58, 61, 63, 64, 65, 69]
    alone = text.alone(some)
    text.open("tree", 58)
    text.open("chunk", 0)
    chunk = text.run([rows_of("chunk", 0, 76)], range(76))
    rows, shown, path = tree_in(text, 58, 11, seed=3)
    together = text.run([rows_of("chunk", 40, 3), rows], [40, 41, 42, *shown], rows=40)
    assert torch.equal(chunk[some], alone)
    assert torch.equal(together[[3 + path[position - 58] for position in some]], alone)
    assert torch.equal(together[:3], chunk[40:43])
    return chunk


CALLS = {
    "one query a key": a_call(1, kv_heads=2),
    "three queries": a_call(3, kv_heads=2),
    "seven queries, heads of 80": a_call(7, 80),
    "heads of 128, window": a_call(4, 128, window=37),
    "heads of 256": a_call(2, 256),
    "other values, chunks": a_call(2, 192, value_size=128, chunk=48),
    "soft cap and sinks": a_call(2, kv_heads=2, softcap=2.0, sinks=torch.tensor([0.3, -1.0, 2.0, 0.5])),
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("name", [*CALLS, "bfloat16"])
def test_trees_and_prompts_give_the_bits_of_plain_rows(name: str) -> None:
    text = Text(a_call(), 76, torch.bfloat16) if name == "bfloat16" else Text(CALLS[name], 76)
    chunk = bits_in_every_packing(text)
    expected = torch.stack([text.expected(position) for position in range(76)])
    assert torch.allclose(chunk.double(), expected, atol=0.03 if name == "bfloat16" else 1e-5)


@pytest.mark.parametrize("window", [None, 70], ids=["all", "window"])
def test_across_the_border_of_segments(window: int | None) -> None:
    """Segments by programs of their own, and one after the other in one program."""
    text = Text(a_call(2, window=window), 520)
    positions = [507, 510, 511, 512, 513, 515]
    alone = text.alone(positions)
    text.open("tree", 507)
    rows, shown, path = tree_in(text, 507, 8, seed=1, others=3)
    assert text.shape([rows], len(shown)).split
    split = text.run([rows], shown)
    assert torch.equal(split, text.run([rows], shown, split=False))
    with pytest.MonkeyPatch.context() as patch:
        # Programs that compute more than one part of the work, and some that compute none.
        patch.setattr(tree_pass, "programs_at_once", lambda device, kv_heads: 1)
        for apart in (True, False):
            assert torch.equal(split, text.run([rows], shown, split=apart))
    assert torch.equal(split[[path[position - 507] for position in positions]], alone)
    for row, position in zip(alone, positions, strict=True):
        assert torch.allclose(row.double(), text.expected(position), atol=1e-5)


def test_requests_of_other_lengths_have_their_own_segments() -> None:
    """In one pass, with padding: three segments, one, and a tree that crosses a border, beside each other."""
    text = Text(a_call(2, kv_heads=2), 1030)
    alone = text.alone([5, 1029, 509, 510, 511, 512, 513])
    text.open("long", 1029)
    text.open("short", 5)
    text.open("tree", 509)
    tree, shown, path = tree_in(text, 509, 4, seed=1)
    batch = [rows_of("long", 1029, 1), rows_of("short", 5, 1), tree]
    for split in (True, False):
        made = text.run(batch, [1029, 5, *shown], rows=16, split=split)
        assert torch.equal(made[0], alone[1]) and torch.equal(made[1], alone[0])
        assert torch.equal(made[[2 + row for row in path]], alone[2:])


def test_a_mask_that_is_off_by_one_is_seen() -> None:
    text = Text(a_call(2), 70)
    alone = text.alone([60, 61, 62, 63])
    text.open("tree", 60)
    rows, shown, path = tree_in(text, 60, 3, seed=2)

    def off_by_one(*given: Any) -> list[list[VirtualGroup]]:
        def shifted(mask: int) -> int:
            return (mask << 1 | mask >> GROUP - 1) & (1 << GROUP) - 1

        return [[replace(one, masks=tuple(map(shifted, one.masks))) for one in tile] for tile in pack(*given)]

    assert torch.equal(text.run([rows], shown)[path], alone)
    assert not torch.equal(text.run([rows], shown, pack=off_by_one)[path], alone)


def test_segments_that_begin_with_the_chunk_are_seen() -> None:
    """Positions that count from the second tile on: the same keys within the window, other borders of segments."""
    text = Text(a_call(2, window=60), 540)
    text.open("alone", 519)
    right = text.run([rows_of("alone", 519, 1)], [519])
    tiles = text.pool.blocks_of("alone")
    text.pool.assign("shifted", tiles[1:], 0)
    wrong = text.run([rows_of("shifted", 519 - TILE, 1)], [519])
    assert torch.allclose(right.float(), wrong.float(), atol=1e-5)
    assert not torch.equal(right, wrong)


def test_products_of_other_groups_are_seen() -> None:
    """On a chip that adds eight terms at a time, the lanes of a tree show."""
    text = Text(a_call(2), 70, group=8)
    alone = text.alone(range(35, 43))
    text.open("tree", 35)
    rows, shown, path = tree_in(text, 35, 7, seed=2, others=3)
    made = text.run([rows], shown)[path]
    assert torch.allclose(made, alone, atol=1e-5)
    assert not torch.equal(made, alone)


# What a row's sums run over: tiles, in them groups, in them positions.
Order = list[list[list[int]]]


def order_of(numbers: Sequence[int], rows: int, row: int) -> Order:
    """The order of summation of a pass's row, read from its description as the kernel reads it."""
    position = numbers[row]
    for at in range(pass_meta.blocks_at(rows), pass_meta.blocks_at(rows) + 4 * rows, 4):
        request, first, count, last = numbers[at : at + 4]
        begin, _, _, tail_tile, tail, chunks, words, width = numbers[request : request + 8]
        if request and begin + first <= row < begin + first + count:
            break
    order: Order = []
    for tile in range(last // TILE + 1):
        if tile < tail_tile:
            seen = [place for place in range(tile * TILE, (tile + 1) * TILE) if place <= position]
            groups = [seen[start : start + GROUP] for start in range(0, len(seen), GROUP)]
        else:
            groups = []
            for chunk in range(numbers[tail + tile - tail_tile], numbers[tail + tile - tail_tile + 1]):
                lanes_at = numbers[chunks + 128 * chunk + TILE : chunks + 128 * chunk + 2 * TILE]
                for start in range(0, TILE, GROUP):
                    word = numbers[words + (row - begin) * width + 2 * chunk + start // 32]
                    groups.append([lanes_at[i] for i in range(start, start + GROUP) if word >> i % 32 & 1])
        order.append([sorted(group) for group in groups if group])
    return [tile for tile in order if tile]


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_a_rows_sums_follows_from_its_position(seed: int) -> None:
    """Of every row, also in trees of 128 nodes that cross borders: the groups that plain decoding has, and its own slots."""
    source = random.Random(seed)
    batch, tables = [], []
    for name in "abc":
        context, chain = source.randrange(0, 200), source.randint(1, 40)
        nodes = source.choice([0, 1, 20, 128])
        deep = source.choice([1, 3, 128])
        parents = [max(-1, source.randint(node - deep, node - 1)) for node in range(nodes)]
        batch.append(rows_of(name, context, chain + nodes, parents))
        tables.append(source.sample(range(100), -(-(context + chain + nodes) // TILE)))
    rows = sum(len(one.tokens) for one in batch) + 3
    sizes = GpuAttentionSizes(share=source.choice([1, 3, 16]), programs=source.choice([1, 100]), parts=10**6)
    shape = PassShape.of(batch, sizes, rows)
    numbers = pass_meta.describe(batch, tables, 100, rows, shape.block_rows, shape.split).numbers.tolist()
    assert len(numbers) <= shape.ints()
    positions = [position for one in batch for position in pass_meta.positions_of(one)]
    for row, position in enumerate([*positions, 0, 0, 0]):
        expected = [
            [
                list(range(start, min(start + GROUP, position + 1)))
                for start in range(tile, min(tile + TILE, position + 1), GROUP)
            ]
            for tile in range(0, position + 1, TILE)
        ]
        assert order_of(numbers, rows, row) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_node_sees_its_ancestors(seed: int) -> None:
    source = random.Random(seed)
    parents = [source.randint(-1, node - 1) for node in range(60)]
    context, chain = 50, 7
    end = context + chain
    for row in range(chain + len(parents)):
        wanted = {position for position in range(48, end) if position <= context + min(row, chain - 1)}
        node = row - chain
        while node >= 0:
            wanted.add(end + node)
            node = parents[node]
        tiles = pack(context, chain, parents, TILE)
        copies = [group for tile in tiles for group in tile if group.number >= 3 and group.masks[row]]
        seen = [slot for group in copies for lane, slot in enumerate(group.slots) if group.masks[row] >> lane & 1]
        assert sorted(seen) == sorted(wanted)
        assert len({group.number for group in copies}) == len(copies)


def test_what_the_kernels_do_not_take() -> None:
    bias = Bias(table=torch.zeros(4, 8))
    assert refusal([a_call()], torch.bfloat16, (9, 0)) == ""
    assert refusal([a_call()], torch.float32, None) == ""
    assert refusal([a_call()], torch.bfloat16, (7, 5)) == (
        "the GPU's compute capability is 7.5: needs 8.0 or later (Ampere)"
    )
    assert refusal([a_call()], torch.float32, (9, 0)) == "keys and values are float32: must be bfloat16 or float16"
    assert refusal([a_call(1, 288)], torch.bfloat16, None) == "heads are 288 wide: must be from 16 to 256"
    assert "alibi" in refusal([a_call(bias=bias)], torch.bfloat16, None)


@pytest.mark.parametrize("name", ["three queries", "heads of 128, window"])
def test_how_keys_lie_in_memory_changes_no_bit(name: str) -> None:
    """By slots, as on a GPU, and by dimensions, as on a CPU: for plain rows and for trees."""
    made = []
    for whole_rows in (True, False):
        text = Text(CALLS[name], 150, whole_rows=whole_rows)
        text.open("tree", 130)
        tree, shown, _ = tree_in(text, 130, 5, seed=1)
        with hopper():
            made.append(text.run([tree], shown))
    assert torch.equal(*made)
    assert [text.pool.keys[0].stride(2) for text in (Text(CALLS[name], 9), Text(CALLS[name], 9, whole_rows=False))] == [
        1,
        64,
    ]
