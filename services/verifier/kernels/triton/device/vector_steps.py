"""States of some numbers for each channel, stepped row by row in the order of a walk (``recurrence.walks``).

Channels are independent of each other: a program takes some of them through all rows of a request.
"""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.keyed_steps import step_at
from services.verifier.recurrence.walks import NOWHERE, REQUEST_INTS, STATE

_NOWHERE, _STATE = tl.constexpr(NOWHERE), tl.constexpr(STATE)
_REQUEST = tl.constexpr(REQUEST_INTS)
# The largest exponent of a state that has seen no row; as in ``recurrence.weighted_mean``.
_LEAST = tl.constexpr(-1e38)


@triton.jit(do_not_specialize=["factor_stride", "added_stride", "width", "steps_at"])
def step_gated(
    factors, added, states, places, made, walk, factor_stride, added_stride, width, steps_at, BLOCK: tl.constexpr
):  # fmt: skip
    """A state decays by a row's factors, and something is added; the row's output is the state.

    Args:
        factors, added: [rows, width], one row every so many numbers.
        states, places, made: [..., width].
        walk: of ``StateWalk``, whose steps begin at ``steps_at``.
    """
    request = walk + tl.program_id(0) * _REQUEST
    first = tl.load(request)
    count = tl.load(request + 1)
    own = states + tl.load(request + 2).to(tl.int64) * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    state = tl.zeros((BLOCK,), tl.float32)
    for at in range(first, first + count):
        row, source, target, saved = step_at(walk, steps_at, at)
        if source >= 0:
            state = tl.load(places + source.to(tl.int64) * width + column, mask=inside, other=0.0)
        if source == _STATE:
            state = tl.load(own + column, mask=inside, other=0.0)
        factor = tl.load(factors + row * factor_stride + column, mask=inside, other=0.0)
        state = state * factor + tl.load(added + row * added_stride + column, mask=inside, other=0.0)
        tl.store(made + row * width + column, state, mask=inside)
        if target != _NOWHERE:
            # Other threads may still read what lies there, and may read this next.
            tl.debug_barrier()
        if target >= 0:
            tl.store(places + target.to(tl.int64) * width + column, state, mask=inside)
        if target == _STATE:
            tl.store(own + column, state, mask=inside)
        if target != _NOWHERE:
            tl.debug_barrier()
        if saved >= 0:
            tl.store(states + saved.to(tl.int64) * width + column, state, mask=inside)


@triton.jit
def _held(state, width, column, inside):
    """The three numbers of each channel."""
    total = tl.load(state + column, mask=inside, other=0.0)
    weight = tl.load(state + width + column, mask=inside, other=0.0)
    return total, weight, tl.load(state + 2 * width + column, mask=inside, other=0.0)


@triton.jit
def _hold(state, width, column, inside, total, weight, largest):
    tl.store(state + column, total, mask=inside)
    tl.store(state + width + column, weight, mask=inside)
    tl.store(state + 2 * width + column, largest, mask=inside)


@triton.jit
def _added(total, weight, largest, exponent, value):
    """The state with a value of this exponent."""
    most = tl.maximum(largest, exponent)
    before = tl.exp(largest - most)
    own = tl.exp(exponent - most)
    return before * total + own * value, before * weight + own, most


@triton.jit(do_not_specialize=["key_stride", "value_stride", "width", "steps_at"])
def step_mean(
    keys, values, decay, bonus, states, places, made, walk, key_stride, value_stride, width, steps_at, BLOCK: tl.constexpr
):  # fmt: skip
    """RWKV's mean of values, weighted by keys and age; see ``recurrence.weighted_mean``.

    Args:
        keys, values: [rows, width], one row every so many numbers.
        decay, bonus: [width], added to the exponents of earlier rows, and to that of a row's own key.
        states, places: [..., 3, width]; made: [rows, width].
        walk: of ``StateWalk``, whose steps begin at ``steps_at``.
    """
    request = walk + tl.program_id(0) * _REQUEST
    first = tl.load(request)
    count = tl.load(request + 1)
    held = states + tl.load(request + 2).to(tl.int64) * 3 * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    ages = tl.load(decay + column, mask=inside, other=0.0)
    more = tl.load(bonus + column, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for at in range(first, first + count):
        row, source, target, saved = step_at(walk, steps_at, at)
        if source >= 0:
            total, weight, largest = _held(places + source.to(tl.int64) * 3 * width, width, column, inside)
        if source == _STATE:
            total, weight, largest = _held(held, width, column, inside)
        # A state without a row holds zeros; afterwards its weight is never below 1.
        largest = tl.where(weight == 0, _LEAST, largest)
        key = tl.load(keys + row * key_stride + column, mask=inside, other=0.0)
        value = tl.load(values + row * value_stride + column, mask=inside, other=0.0)
        read, read_weight, _ = _added(total, weight, largest, key + more, value)
        tl.store(made + row * width + column, read / read_weight, mask=inside)
        total, weight, largest = _added(total, weight, largest + ages, key, value)
        if target != _NOWHERE:
            # As above.
            tl.debug_barrier()
        if target >= 0:
            _hold(places + target.to(tl.int64) * 3 * width, width, column, inside, total, weight, largest)
        if target == _STATE:
            _hold(held, width, column, inside, total, weight, largest)
        if target != _NOWHERE:
            tl.debug_barrier()
        if saved >= 0:
            _hold(states + saved.to(tl.int64) * 3 * width, width, column, inside, total, weight, largest)
