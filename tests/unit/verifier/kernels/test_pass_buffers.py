"""Where descriptions of captured passes lie: two places on the host that take turns, one on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.verifier.attention.calls import Call, Pass
from services.verifier.attention.fixed import Largest
from services.verifier.kernels.triton.pass_buffers import PassBuffers
from services.verifier.kernels.triton.pass_describer import PassDescriber
from services.verifier.kernels.triton.pass_meta import describe, positions_of
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.graphs import Graphs, Keep, Made
from services.verifier.model.target_port import Rows
from tests.kernels.recorded_graphs import recorded

CPU = torch.device("cpu")
CALL = Call(entry=0, heads=4, kv_heads=1, key_size=16, value_size=16, scale=0.25)
TREE = Rows(request_id="a", context=70, tokens=(5, 6, 7, 8), parents=(-1, 0, -1), logits=4)
CHAIN = Rows(request_id="b", context=3, tokens=(9,), logits=1)


def test_a_pass_is_laid_out_while_the_one_before_is_on_its_way() -> None:
    buffers = PassBuffers(CPU)
    place = buffers.reserve(5, 40)
    first_tokens, first = buffers.next(place)
    first_tokens[:], first[:3] = 7, (1, 2, 3)
    buffers.send(place, 3)
    second_tokens, second = buffers.next(place)
    assert not np.shares_memory(first, second) and not np.shares_memory(first_tokens, second_tokens)
    second_tokens[:], second[:3] = 8, (4, 5, 6)
    assert place.tokens.tolist() == [7] * 5 and place.description[:3].tolist() == [1, 2, 3]
    buffers.send(place, 3)
    assert place.tokens.tolist() == [8] * 5 and place.description[:3].tolist() == [4, 5, 6]
    assert np.shares_memory(buffers.next(place)[1], first)


def test_a_graph_finds_its_numbers_where_it_was_captured_though_a_larger_one_came() -> None:
    buffers = PassBuffers(CPU)
    small = buffers.reserve(2, 8)
    large = buffers.reserve(9, 80)
    for place, number in ((small, 3), (large, 4), (small, 5)):
        tokens, numbers = buffers.next(place)
        tokens[:], numbers[:8] = number, number
        buffers.send(place, 8)
        assert place.tokens.tolist() == [number] * place.rows and place.description[:8].tolist() == [number] * 8
    # Kernels are compiled for numbers that begin at a multiple of 16 bytes.
    assert all((place.description.data_ptr() - place.held.data_ptr()) % 16 == 0 for place in (small, large))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_description_in_place_is_the_reference(compiled: bool) -> None:
    pool = KVPool([CALL], rows=640, dtype=torch.bfloat16, device=CPU, whole_rows=True)
    pool.assign("a", [4, 2], 0)
    pool.assign("b", [1], 0)
    describer = PassDescriber(pool)
    if not compiled:
        describer._kernel = None
    found = np.full(4096, -1, dtype=np.int32)
    expected = describe([TREE, CHAIN], [[4, 2], [1]], pool.padding_block, 8, 4, True).numbers
    assert describer.describe_into([TREE, CHAIN], 8, 4, True, found) == len(expected)
    assert found[: len(expected)].tolist() == expected.tolist()
    assert set(found[len(expected) :].tolist()) == {-1}


def test_a_captured_pass_is_filled_and_then_entered() -> None:
    pytest.importorskip("triton")
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    pool = KVPool([CALL], rows=640, dtype=torch.bfloat16, device=CPU, whole_rows=True)
    pool.assign("a", [4, 2], 0)
    pool.assign("b", [1], 0)
    buckets = TritonBuckets(pool)
    shape = buckets.bucket([TREE, CHAIN])
    assert shape is not None
    fixed, others = buckets.make(shape), buckets.make(shape)
    fixed.fill([TREE, CHAIN])
    fixed.enter()
    assert fixed.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0] and fixed.positions.tolist() == [70, 71, 72, 71, 3, 0, 0, 0]
    # They take turns: what was laid out for another one counts from then on.
    others.fill([CHAIN])
    fixed.enter()
    assert fixed.tokens.tolist() == [9] + [0] * 7
    launched = buckets.launched([TREE, CHAIN], 3)
    assert launched.positions.tolist() == [70, 71, 72, 71, 3, 0, 0, 0]


def test_a_replay_takes_what_was_laid_out_last() -> None:
    """With a stand-in for CUDA graphs that runs no Python again: what a graph reads must lie where it was captured."""
    pytest.importorskip("triton")
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    pool = KVPool([CALL], rows=640, dtype=torch.bfloat16, device=CPU, whole_rows=True)
    pool.assign("a", [4, 2], 0)
    pool.assign("b", [1], 0)

    def run(laid_out: Pass, given: torch.Tensor, layers: Sequence[int], keep: Keep) -> Made:
        return Made(torch.stack((given, laid_out.positions), 1), {})

    graphs = Graphs(TritonBuckets(pool), run, torch.empty(0, dtype=torch.int64), capture=recorded)
    assert graphs.capture(Largest(rows=8, requests=2, positions=200), [()]) > 3
    for batch in ([TREE, CHAIN], [CHAIN], [TREE], [CHAIN, TREE], [CHAIN]):
        replay = graphs.lay_out(batch)
        assert replay is not None
        tokens = [token for rows in batch for token in rows.tokens]
        positions = [position for rows in batch for position in positions_of(rows)]
        assert replay(None).rows.T.tolist() == [tokens, positions]
