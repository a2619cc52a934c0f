"""What programs of attention on a GPU compute: every segment of every block once, in memory of its own, and none in vain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from services.verifier.attention.calls import TILE, Call
from services.verifier.attention.fixed import Largest
from services.verifier.kernels.triton import pass_meta
from services.verifier.kernels.triton.pass_meta import SEGMENT
from services.verifier.kernels.triton.pass_shape import MOST_SUMS_BYTES, GpuAttentionSizes, PassShape
from services.verifier.kernels.triton.tree_pass import TritonBuckets, TritonPass
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows

CPU = torch.device("cpu")
# Of Llama 3.1 8B: on an H100, 33 programs of each key-value head at a time.
CALL = Call(entry=0, heads=32, kv_heads=8, key_size=128, value_size=128, scale=0.1)
SIZES = GpuAttentionSizes.of([CALL], CPU)


def plain(*contexts: int, rows: int = 1) -> list[Rows]:
    return [
        Rows(request_id=str(number), context=context, tokens=(0,) * rows, logits=1)
        for number, context in enumerate(contexts)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_segment_of_every_block_is_computed_once(seed: int) -> None:
    source = random.Random(seed)
    batch = []
    for name in "abcd"[: source.randint(1, 4)]:
        nodes = source.choice([0, 7, 100])
        parents = tuple(max(-1, node - source.randint(1, 9)) for node in range(nodes))
        context, chain = source.choice([0, 400, 511, 1100, 3000]), source.choice([1, 30, 600])
        batch.append(Rows(request_id=name, context=context, tokens=(0,) * (chain + nodes), parents=parents, logits=1))
    tables = [range((one.context + len(one.tokens)) // TILE + 1) for one in batch]
    rows = sum(len(one.tokens) for one in batch) + source.randint(0, 20)
    shape = PassShape.of(batch, replace(SIZES, parts=10**6, programs=10**6), rows)
    found = pass_meta.describe(batch, tables, 99, rows, shape.block_rows, True).numbers
    positions = found[:rows]
    count, at = found[pass_meta.work_at(rows) : pass_meta.work_at(rows) + 2]
    parts = [tuple(one) for one in found[at : at + 2 * count].reshape(-1, 2).tolist()]
    blocks = found[pass_meta.blocks_at(rows) : pass_meta.work_at(rows)].reshape(-1, 4)
    wanted = set()
    seen_rows = []
    for number, (request, first, members, _) in enumerate(blocks.tolist()):
        if request:
            own = [found[request] + first + row for row in range(members)]
            seen_rows += own
            wanted |= {(number, part) for row in own for part in range(positions[row] // SEGMENT + 1)}
    assert sorted(parts) == sorted(wanted) and sorted(seen_rows) == list(range(rows))
    # The sums of a row begin where those of the row before end.
    begins = found[pass_meta.sums_at(rows) : pass_meta.blocks_at(rows)].tolist()
    ends = [begin + position // SEGMENT + 1 for begin, position in zip(begins, positions.tolist(), strict=True)]
    assert begins == [0, *ends[:-1]] and count <= ends[-1]
    assert not shape.split or ends[-1] <= shape.parts
    # Without segments apart, the blocks are the work.
    whole = pass_meta.describe(batch, tables, 99, rows, shape.block_rows, False).numbers
    assert whole[pass_meta.work_at(rows)] == (blocks[:, 0] > 0).sum() and len(whole) == len(found) - 2 * count


@pytest.mark.parametrize(
    ("batch", "rows", "split"),
    [
        (plain(500), 1, False),
        (plain(4096), 1, True),
        (plain(4096, rows=64), 64, True),
        # Enough requests keep all programs busy as they are; a longer one beside them would end last.
        (plain(*[4096] * 64), 64, False),
        (plain(*[1000] * 63, 32000), 64, True),
        # So do the blocks of a long prompt.
        (plain(8192, rows=2048), 2048, False),
        # More sums than memory is kept for.
        (plain(131072, rows=300), 320, False),
    ],
    ids=["short", "one", "a tree", "many", "one of them long", "prompt", "much memory"],
)
def test_segments_are_apart_where_programs_would_wait(batch: Sequence[Rows], rows: int, split: bool) -> None:
    assert PassShape.of(batch, SIZES, rows).split == split


def test_passes_that_are_launched_keep_within_the_memory_of_captured_ones() -> None:
    pool = KVPool([CALL], rows=2048, dtype=torch.bfloat16, device=CPU, whole_rows=True)
    pool.assign("0", list(range(32)), 0)
    buckets, largest = TritonBuckets(pool), Largest(rows=200, requests=4, positions=2000)
    first = buckets.allowed(largest)[0]
    assert first.split and first == max(buckets.allowed(largest), key=lambda shape: shape.parts)
    assert 4 * first.parts * 32 * 130 <= MOST_SUMS_BYTES
    # It would be split, had captured passes that much.
    batch = plain(1400, rows=500)
    before, after = (kind.launched(batch, 0) for kind in (TritonBuckets(pool), buckets))
    assert isinstance(before, TritonPass) and isinstance(after, TritonPass)
    assert before._shape.split and before._shape.parts > first.parts and not after._shape.split
    # A pass that is longer than those that are captured has no bucket, so nothing is overwritten.
    assert buckets.bucket(plain(1999)) is not None and buckets.bucket(plain(9000)) is None
