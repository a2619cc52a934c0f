"""The compiled description of a pass is the reference's, number for number."""

from __future__ import annotations

from array import array
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from services.verifier.attention.calls import TILE
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.pass_meta_kernel import PassMetaKernel
from services.verifier.kernels.triton.pass_meta import describe
from services.verifier.model.target_port import Rows, SingleRows

PADDING_BLOCK = 5000


def places_of(tables: list[array[int]]) -> NDArray[np.int64]:
    return np.array([table.buffer_info() for table in tables], dtype=np.int64)


def a_tree(draw: Random, nodes: int) -> tuple[int, ...]:
    """Deep, bushy or mixed."""
    back = draw.choice((1, 2, 5, nodes))
    return tuple(draw.randrange(max(-1, node - back), node) for node in range(nodes))


def a_request(draw: Random, number: int) -> Rows:
    kind = draw.randrange(4)
    chain = draw.choice((1, 2, 7, 63, 64, 65, 200)) if kind == 0 else 1
    parents = () if kind == 1 else a_tree(draw, draw.choice((1, 3, 4, 16, 17, 40, 127, 128)))
    context = draw.choice((0, 1, 15, 16, 48, 60, 63, 64, 65, 500, 1023))
    tokens = tuple(draw.randrange(1000) for _ in range(chain + len(parents)))
    return Rows(request_id=f"r{number}", context=context, tokens=tokens, parents=parents, logits=1 + len(parents))


@pytest.mark.parametrize("seed", range(60))
def test_the_numbers_are_the_references(seed: int) -> None:
    kernels = library()
    if kernels is None:
        pytest.skip("there is no C compiler")
    draw = Random(seed)
    batch = [a_request(draw, number) for number in range(draw.choice((1, 2, 5, 20)))]
    # A request may own more blocks than its rows reach.
    sizes = [(rows.context + len(rows.tokens) - 1) // TILE + 1 + draw.randrange(3) for rows in batch]
    tables = [array("i", (draw.randrange(PADDING_BLOCK) for _ in range(size))) for size in sizes]
    rows = sum(len(each.tokens) for each in batch) + draw.choice((0, 1, 13))
    block_rows, split = draw.choice((1, 4, 16)), bool(seed % 2)
    found = PassMetaKernel(kernels).describe(batch, places_of(tables), PADDING_BLOCK, rows, block_rows, split)
    wanted = describe(batch, tables, PADDING_BLOCK, rows, block_rows, split)
    assert found is not None
    np.testing.assert_array_equal(found, wanted.numbers)


def test_a_tree_that_is_too_large_is_left_to_the_reference() -> None:
    kernels = library()
    if kernels is None:
        pytest.skip("there is no C compiler")
    table = array("i", range(4))
    large = Rows(request_id="r", context=3, tokens=(1,) * 130, parents=tuple(range(-1, 128)), logits=130)
    assert PassMetaKernel(kernels).describe([large], places_of([table]), 9, 130, 4, True) is None


def test_rows_beyond_a_requests_blocks_are_refused() -> None:
    kernels = library()
    if kernels is None:
        pytest.skip("there is no C compiler")
    rows = Rows(request_id="r", context=64, tokens=(1,), logits=1)
    table = array("i", [7])
    with pytest.raises(IndexError, match="owns 1 blocks"):
        PassMetaKernel(kernels).describe([rows], places_of([table]), 9, 1, 4, True)


def test_rows_by_columns_are_described_as_one_by_one() -> None:
    kernels = library()
    if kernels is None:
        pytest.skip("there is no C compiler")
    contexts = [0, 63, 64, 65, 500]
    tables = [array("i", range(9 * number, 9 * number + 9)) for number in range(len(contexts))]
    batch = SingleRows([f"r{number}" for number in range(len(contexts))], contexts, [7, 8, 9, 10, 11])
    describing = PassMetaKernel(kernels)
    found = describing.describe(batch, places_of(tables), 99, 8, 4, True)
    assert found is not None
    columns = found.copy()
    np.testing.assert_array_equal(columns, describing.describe([*batch], places_of(tables), 99, 8, 4, True))
