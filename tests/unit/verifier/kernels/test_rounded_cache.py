"""Keys and values of eight bits: what is stored, that attention reads it, and what moves with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.model_files.weights.rounded_inputs import InputRounding
from services.verifier.attention.calls import Call
from services.verifier.kernels.native.attention_kernel import kernel_for, lay_out
from services.verifier.kernels.native.library import Library
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.model.pass_layouts import PassLayouts
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.kernels.kernels_here import SETS, kernels_of
from tests.running.refusals import refuses
from tests.unit.verifier.kernels.test_native_kernels import CALLS
from tests.unit.verifier.test_moved_rows import CALLS as SMALL_CALLS
from tests.unit.verifier.test_moved_rows import MOVES, OWNED, check

ROUNDING = InputRounding(floats=True)
PARENTS = (-1, -1, 0, 2, 1, 4)
ROWS = 90 + len(PARENTS)


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Library:
    return kernels_of(request.param)


def pool_of(calls: list[Call], *, rounded: bool) -> KVPool:
    pool = KVPool(calls, rows=9 * BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    if rounded:
        pool.round_rows(9 * BLOCK)
    return pool


def attended(
    kernels: Library, call: Call, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, rounded: bool
) -> tuple[torch.Tensor, KVPool]:
    """A prompt with a tree behind it, in two passes."""
    pool = pool_of([call], rounded=rounded)
    pool.assign("a", [1, 0, 2], 3)
    kernel, made = kernel_for(kernels, pool), []
    assert kernel is not None
    for first, rows in (
        (0, Rows(request_id="a", context=0, tokens=(0,) * 70, logits=1)),
        (70, Rows(request_id="a", context=70, tokens=(0,) * 26, parents=PARENTS, logits=7)),
    ):
        part = slice(first, first + len(rows.tokens))
        made.append(lay_out(kernel, pool, [rows], 0).attend(call, *[each[:, part].contiguous() for each in given]))
    return torch.cat(made), pool


def random_rows(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    keys, values = torch.randn(call.kv_heads, ROWS, call.key_size), torch.randn(call.kv_heads, ROWS, call.value_size)
    # Rows of zeros alone, of few numbers, small ones, and numbers below the least that have all bits.
    keys[:, 3], keys[:, 5, 1:], values[:, 7], values[:, 9, 2:] = 0, 0, 0, -0.0
    keys[:, 11] *= 1e-30
    values[:, 13] *= torch.logspace(0, -12, call.value_size)
    return torch.randn(call.heads, ROWS, call.key_size), keys, values


@pytest.mark.parametrize("value_size", [32, 16, 48])
@pytest.mark.parametrize("kind", list(CALLS))
def test_attention_reads_what_is_rounded(kernels: Library, kind: str, value_size: int) -> None:
    """Prompts, what follows them and trees: as if the numbers had been rounded before they came."""
    call = Call(entry=0, heads=4, kv_heads=2, key_size=32, value_size=value_size, scale=32**-0.5, **CALLS[kind])
    query, keys, values = random_rows(call)
    made, pool = attended(kernels, call, (query, keys, values), rounded=True)
    before, plain = attended(kernels, call, (query, ROUNDING(keys), ROUNDING(values)), rounded=False)
    assert torch.equal(made, before)
    assert not torch.equal(made, attended(kernels, call, (query, keys, values), rounded=False)[0])
    assert pool.keys[0].dtype == torch.uint8 and pool.values[0].shape[-1] == value_size
    # Bytes are those of torch's type; a block's numbers are those of the pool that was given rounded ones.
    read = pool.keys[0].view(torch.float8_e4m3fn).float() * pool.key_scales[0]
    assert torch.equal(read[1], plain.keys[0][1])
    read = pool.values[0].view(torch.float8_e4m3fn).float() * pool.value_scales[0]
    assert torch.equal(read[1], plain.values[0][1, :, :, :-1])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_what_is_no_number_stays_none(kernels: Library, which: int, number: float) -> None:
    call = Call(entry=0, heads=4, kv_heads=2, key_size=32, value_size=32, scale=32**-0.5)
    given = random_rows(call)
    given[which][0, 40, 3] = number
    made, _ = attended(kernels, call, given, rounded=True)
    assert not made[40, :2].isfinite().any() and made[40, 2:].isfinite().all()
    # Values that a row does not see are multiplied by zero, here as where they are not rounded.
    assert made[39].isfinite().all() or which == 2


def filled() -> KVPool:
    pool = pool_of(SMALL_CALLS, rounded=True)
    for keys, values in pool._alike:
        for each in (keys, values):
            each.copy_(torch.randint(0, 255, each.shape) if each.dtype == torch.uint8 else torch.randn(each.shape))
    for owner, blocks in OWNED.items():
        pool.assign(owner, blocks, 0)
    return pool


def with_scales(pool: KVPool) -> KVPool:
    """As the tests of moves look at it: the scales are further calls."""
    pool.keys, pool.values = pool.keys + pool.key_scales, pool.values + pool.value_scales
    return pool


@pytest.mark.parametrize("name", MOVES)
def test_scales_move_with_their_rows(name: str) -> None:
    check(with_scales(filled()), MOVES[name])


def test_scales_that_stay_behind_are_seen() -> None:
    pool = filled()
    pool._alike = [pair for pair in pool._alike if pair[0].dtype == torch.uint8]
    with pytest.raises(AssertionError):
        check(with_scales(pool), MOVES["onto others that move"])


def test_a_new_owner_reads_nothing_of_the_one_before() -> None:
    pool = filled()
    pool.assign("new", [4], 1)
    pool.settle()
    assert not pool.values[0][4].any() and not pool.value_scales[0][4].any() and pool.values[0][3].any()


def test_a_pool_that_grows_keeps_its_rows() -> None:
    pool = filled()
    held = [each[:9].clone() for each in (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales)]
    pool.grow(12)
    now = [each[:9] for each in (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales)]
    assert all(torch.equal(one, other) for one, other in zip(held, now, strict=True))


def test_others_that_attend_are_refused() -> None:
    with refuses(ConfigurationError, field="verifier.kv_cache_dtype", value="fp8"):
        PassLayouts(pool_of(SMALL_CALLS, rounded=False), None, None).round_rows(64)


def test_every_byte_is_read_as_its_number(kernels: Library) -> None:
    """Every byte that is a number, by rows that have it."""
    call: Any = Call(entry=0, heads=2, kv_heads=2, key_size=256, value_size=256, scale=1.0)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)
    keys = numbers.expand(2, ROWS, 256) * 0.5
    _, pool = attended(kernels, call, (keys, keys, keys), rounded=True)
    assert torch.equal(pool.values[0][1, 0, 5].view(torch.float8_e4m3fn).float(), numbers)
    assert float(pool.value_scales[0][1, 0, 5]) == 0.5
