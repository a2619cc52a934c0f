"""Keys and values of eight bits by Triton's kernels: what they store, that attention reads it, and in any packing alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

pytest.importorskip("triton")
import triton.language as tl

from services.model_files.weights.rounded_inputs import InputRounding
from services.verifier.attention.calls import TILE, Call
from services.verifier.kernels.native.library import library
from services.verifier.kernels.triton.device import held_bytes, tree_attend
from services.verifier.kernels.triton.tree_pass import TritonBuckets
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.model.pass_layouts import PassLayouts
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.kernels.kernels_here import needs_kernels
from tests.kernels.triton_interpreter import hopper
from tests.running.refusals import refuses
from tests.unit.verifier.kernels import test_rounded_cache as on_cpus
from tests.unit.verifier.kernels.test_decoder_layer import TAKEN, TREE, Served
from tests.unit.verifier.kernels.test_rounded_cache import PARENTS, random_rows
from tests.unit.verifier.kernels.test_triton_attention import CALLS, Text, a_call, bits_in_every_packing, rows_of, tree_in

pytestmark = pytest.mark.exhaustive

ROUNDING = InputRounding(floats=True)
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attended(call: Call, given: Given, *, rounded: bool) -> tuple[torch.Tensor, KVPool]:
    """A prompt with a tree behind it, in two passes; all numbers are of the type of ``given``."""
    pool = KVPool([call], rows=3 * BLOCK, dtype=given[0].dtype, device=torch.device("cpu"), whole_rows=True)
    if rounded:
        pool.round_rows(3 * BLOCK)
    pool.assign("a", [1, 0, 2], 3)
    made = []
    for first, rows in (
        (0, Rows(request_id="a", context=0, tokens=(0,) * 70, logits=1)),
        (70, Rows(request_id="a", context=70, tokens=(0,) * 26, parents=PARENTS, logits=7)),
    ):
        part = slice(first, first + len(rows.tokens))
        with hopper():
            made.append(TritonBuckets(pool).launched([rows], 0).attend(call, *[each[:, part] for each in given]))
    return torch.cat(made), pool


def in_order(held: torch.Tensor) -> torch.Tensor:
    """Bytes by number: of a row byte 2 i is number i, and byte 2 i + 1 one of the second half."""
    return torch.cat([held[..., 0::2], held[..., 1::2]], -1)


def as_held(held: torch.Tensor) -> torch.Tensor:
    """The inverse of ``in_order``."""
    return torch.stack(held.chunk(2, -1), -1).flatten(-2)


def given_to(call: Call, dtype: torch.dtype) -> Given:
    query, keys, values = (each.to(dtype) for each in random_rows(call))
    return query, keys, values


@pytest.mark.examples(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_attention_reads_what_is_rounded(name: str, dtype: torch.dtype) -> None:
    """Prompts, what follows them and trees: as if the numbers had been rounded before they came."""
    call = CALLS[name]
    query, keys, values = given_to(call, dtype)
    made, pool = attended(call, (query, keys, values), rounded=True)
    expanded, plain = attended(call, (query, *map(ROUNDING.in_float32, (keys, values))), rounded=False)
    assert torch.equal(made, expanded)
    assert not torch.equal(made, attended(call, (query, keys, values), rounded=False)[0])
    assert pool.keys[0].dtype == pool.values[0].dtype == torch.uint8
    for bytes_, scales, wanted in (
        (pool.keys[0].mT, pool.key_scales[0].mT, plain.keys[0].mT),
        (pool.values[0], pool.value_scales[0], plain.values[0]),
    ):  # fmt: skip
        numbers = in_order(bytes_).view(torch.float8_e4m3fn).float() * scales
        assert torch.equal(numbers.to(dtype)[1], wanted[1])


@needs_kernels
@pytest.mark.parametrize("value_size", [32, 48])
def test_bytes_and_scales_are_those_of_a_cpu(value_size: int) -> None:
    call = Call(entry=0, heads=4, kv_heads=2, key_size=32, value_size=value_size, scale=32**-0.5)
    given = random_rows(call)
    _, here = attended(call, given, rounded=True)
    kernels = library()
    assert kernels is not None
    _, there = on_cpus.attended(kernels, call, given, rounded=True)
    for mine, other in (
        (in_order(here.keys[0].mT), there.keys[0].mT), (in_order(here.values[0]), there.values[0]),
        (here.key_scales[0], there.key_scales[0]), (here.value_scales[0], there.value_scales[0]),
    ):  # fmt: skip
        # Of the request's first two blocks.
        assert torch.equal(mine[:2], other[:2])


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_what_is_no_number_stays_none(which: int, number: float) -> None:
    call = a_call(2, 32, kv_heads=2)
    given = given_to(call, torch.bfloat16)
    given[which][0, 40, 3] = number
    made, _ = attended(call, given, rounded=True)
    assert not made[40, :2].isfinite().any() and made[40, 2:].isfinite().all()
    # Values that a row does not see are multiplied by zero, here as where they are not rounded.
    assert made[39].isfinite().all() or which == 2


class RoundedText(Text):
    """A text whose committed keys and values are held as torch rounds them."""

    def __init__(self, call: Call, length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(call, length, dtype)
        self.pool.round_rows(self.pool.total_blocks * BLOCK)

    @override
    def open(self, name: str, context: int) -> None:
        super().open(name, 0)
        pool, tiles = self.pool, self.pool.blocks_of(name)
        for start in range(0, context, TILE):
            end, tile = min(context, start + TILE), tiles[start // TILE]
            places = slice(end - start)
            for given, held, scales in (
                (self.key, pool.keys[0][tile].mT, pool.key_scales[0][tile].mT),
                (self.value, pool.values[0][tile], pool.value_scales[0][tile]),
            ):
                rows = given[:, start:end].float()
                scale = rows.abs().amax(-1, keepdim=True) / 448
                held[:, places] = as_held((rows / scale).to(torch.float8_e4m3fn).view(torch.uint8))
                scales[:, places] = scale


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ["three queries", "heads of 128, window", "soft cap and sinks", "bfloat16"])
def test_trees_and_prompts_give_the_bits_of_plain_rows(name: str) -> None:
    bits_in_every_packing(RoundedText(a_call(), 76, torch.bfloat16) if name == "bfloat16" else RoundedText(CALLS[name], 76))


def test_across_the_border_of_segments() -> None:
    """Segments by programs of their own, and one after the other in one program."""
    text = RoundedText(a_call(2), 520)
    positions = [510, 511, 512, 515]
    alone = text.alone(positions)
    text.open("tree", 507)
    rows, shown, path = tree_in(text, 507, 8, seed=1, others=3)
    assert text.shape([rows], len(shown)).split
    split = text.run([rows], shown)
    assert torch.equal(split, text.run([rows], shown, split=False))
    assert torch.equal(split[[path[position - 507] for position in positions]], alone)


@pytest.mark.parametrize("fault", ["the neighbour's scale", "no scale", "cut off", "another head's scale"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, widen = held_bytes.store_rounded, held_bytes.widened

    def of_neighbours(pairs: Any, first: Any, scales: Any, like: Any) -> Any:
        scales.handle.data = np.roll(scales.handle.data, 1)
        return widen(pairs, first, scales, like)

    def unscaled(numbers: Any, row: Any, scale_at: Any, *sizes: Any) -> None:
        store(numbers, row, scale_at, *sizes)
        tl.store(scale_at, 1.0)

    def elsewhere(numbers: Any, row: Any, scale_at: Any, *sizes: Any) -> None:
        store(numbers, row, scale_at + TILE * (1 - 2 * (tl.program_id(1) % 2)), *sizes)

    if fault == "the neighbour's scale":
        monkeypatch.setattr(tree_attend, "widened", of_neighbours)
    elif fault == "cut off":
        monkeypatch.setattr(held_bytes, "nearest_float", lambda code: code)
    else:
        wrong = unscaled if fault == "no scale" else elsewhere
        monkeypatch.setattr("services.verifier.kernels.triton.device.write_rows.store_rounded", wrong)
    with pytest.raises(AssertionError):
        test_attention_reads_what_is_rounded("one query a key", torch.float32)


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ["llama", "norms of heads in bfloat16", "biases", "a part is rotated, one product"])
def test_whole_layers_store_the_same_bytes(name: str) -> None:
    kind, dtype, settings = TAKEN[name]
    served = Served(kind, dtype, **settings)
    served.pool.round_rows(128)
    pool = served.pool
    held = (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales)
    with hopper():
        plain = served.run(TREE)[0]
        kept = [each.clone() for each in held]
        assert served.fuse() == (settings.get("num_hidden_layers", 1), "")
        for each in held:
            each.zero_()
        made = served.run(TREE)[0]
    assert torch.equal(made, plain)
    # All but the tile of padding rows.
    assert all(torch.equal(mine[:2], other[:2]) for mine, other in zip(held, kept, strict=True))


def test_buckets_hold_what_launched_passes_hold() -> None:
    """A pass that is filled anew, as captured ones are."""
    text = RoundedText(a_call(2), 80)
    alone = text.alone([60, 66])
    text.open("a", 60)
    text.open("b", 66)
    buckets = TritonBuckets(text.pool)
    batches = {60: [rows_of("a", 60, 1)], 66: [rows_of("b", 66, 1)]}
    shape = buckets.bucket(batches[60])
    assert shape is not None
    fixed = buckets.make(shape)
    for number, position in enumerate((60, 66)):
        fixed.fill(batches[position])
        places = [position] + [text.length] * (shape.rows - 1)
        with hopper():
            made = fixed.attend(text.call, text.query[:, places], text.key[:, places], text.value[:, places])
        assert torch.equal(made[0], alone[number])


def test_odd_heads_are_refused() -> None:
    call = a_call(2, 33)
    pool = KVPool([call], rows=64, dtype=torch.bfloat16, device=torch.device("cpu"), whole_rows=True)
    with refuses(ConfigurationError, field="verifier.kv_cache_dtype", value="fp8"):
        PassLayouts(pool, TritonBuckets(pool), None).round_rows(64)
