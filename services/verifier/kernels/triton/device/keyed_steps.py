"""States that hold values by their keys, stepped row by row: selective scans, linear attention and delta rules.

The numbers of a value are independent of each other. So a program takes some of them, under one head, through all rows of a
request in the order of a walk (``recurrence.walks``), and has what the state holds of them in registers. A sum over keys
stays in one warp, in one order. No number depends on how rows are cut into passes, or on who else is in the pass.
"""

import triton
import triton.language as tl

from services.verifier.recurrence.walks import NOWHERE, REQUEST_INTS, STATE, STEP_INTS

_NOWHERE, _STATE = tl.constexpr(NOWHERE), tl.constexpr(STATE)
_REQUEST, _STEP = tl.constexpr(REQUEST_INTS), tl.constexpr(STEP_INTS)

# By what a state decays: one factor for a head, one for each key, or e^(time * decay) for each number.
BY_ONE, BY_KEY, BY_NUMBER = 0, 1, 2
_BY_KEY, _BY_NUMBER = tl.constexpr(BY_KEY), tl.constexpr(BY_NUMBER)


@triton.jit
def _row(
    row, keys, queries, values, factors, times, parts, key_stride, query_stride, value_stride, factor_stride, time_stride,
    part_stride, head, key_head, lane, column,
    KEY: tl.constexpr, VALUE: tl.constexpr, BY: tl.constexpr, PARTED: tl.constexpr,
):  # fmt: skip
    """What one row is given: its key, query, value, what its decay is made of, and its part."""
    of_keys = lane < KEY
    of_values = column < VALUE
    key = tl.load(keys + row * key_stride + key_head * KEY + lane, mask=of_keys, other=0.0)
    query = tl.load(queries + row * query_stride + key_head * KEY + lane, mask=of_keys, other=0.0)
    value = tl.load(values + row * value_stride + head * VALUE + column, mask=of_values, other=0.0)
    if BY == _BY_NUMBER:
        factor = tl.load(times + row * time_stride + head * VALUE + column, mask=of_values, other=0.0)
    elif BY == _BY_KEY:
        factor = tl.load(factors + row * factor_stride + head * KEY + lane, mask=of_keys, other=0.0)
    else:
        factor = tl.load(factors + row * factor_stride + head)
    # Not read unless PARTED.
    part = factor
    if PARTED:
        part = tl.load(parts + row * part_stride + head)
    return key, query, value, factor, part


@triton.jit
def step_at(walk, steps_at, at):
    """A step of a walk: its row, where its parent's state is, where its own is put, and where a copy is kept."""
    step = walk + steps_at + at * _STEP
    return tl.load(step).to(tl.int64), tl.load(step + 1), tl.load(step + 2), tl.load(step + 3)


@triton.jit
def _decayed(state, factor, decays, BY: tl.constexpr):
    if BY == _BY_NUMBER:
        return state * tl.exp(factor[None, :] * decays)
    elif BY == _BY_KEY:
        return state * factor[:, None]
    else:
        return state * factor


@triton.jit
def _put(state, target, saved, slot, states, places, inside, fits, SIZE: tl.constexpr):
    """Put a state where a step says; SIZE: numbers of a whole one."""
    if target != _NOWHERE:
        # Other threads may still read what lies there, and may read this next.
        tl.debug_barrier()
        if target == _STATE:
            tl.store(states + slot * SIZE + inside, state, mask=fits)
        else:
            tl.store(places + target.to(tl.int64) * SIZE + inside, state, mask=fits)
        tl.debug_barrier()
    if saved >= 0:
        tl.store(states + saved.to(tl.int64) * SIZE + inside, state, mask=fits)


@triton.jit(
    do_not_specialize=[
        "key_stride",
        "query_stride",
        "value_stride",
        "factor_stride",
        "time_stride",
        "part_stride",
        "steps_at",
    ]
)
def step_keyed(
    keys, queries, values, factors, times, decay, parts, states, places, made, walk,
    key_stride, query_stride, value_stride, factor_stride, time_stride, part_stride, steps_at,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, KEYS: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, BY: tl.constexpr, PARTED: tl.constexpr,
):  # fmt: skip
    """All rows of a request, for COLUMNS numbers of one head's values. Of ``KeyedRows``, a row every so many numbers.

    Args:
        factors: read unless BY is BY_NUMBER, then ``times`` and ``decay``, [HEADS, KEY, VALUE], are. ``parts``: if PARTED.
        states: [slots, HEADS, KEY, VALUE]; ``places``: the same, of a walk's places.
        made: [rows, HEADS, VALUE].
        walk: of ``StateWalk``, whose steps begin at ``steps_at``.
        KEYS: a power of two, at least KEY.
    """
    request = walk + tl.program_id(0) * _REQUEST
    head = tl.program_id(1)
    first = tl.load(request)
    count = tl.load(request + 1)
    slot = tl.load(request + 2).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    lane = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    fits = (lane < KEY)[:, None] & (column < VALUE)[None, :]
    inside = (head * KEY + lane[:, None]) * VALUE + column[None, :]
    size = HEADS * KEY * VALUE
    state = tl.zeros((KEYS, COLUMNS), tl.float32)
    decays = tl.zeros((KEYS, COLUMNS), tl.float32)
    if BY == _BY_NUMBER:
        decays = tl.load(decay + inside, mask=fits, other=0.0)
    row, source, target, saved = step_at(walk, steps_at, first)
    key, query, value, factor, part = _row(
        row, keys, queries, values, factors, times, parts, key_stride, query_stride, value_stride, factor_stride,
        time_stride, part_stride, head, key_head, lane, column, KEY, VALUE, BY, PARTED,
    )  # fmt: skip
    for at in range(first, first + count):
        # The next row is read while this one is computed; behind the last, it once more.
        next_row, next_source, next_target, next_saved = step_at(walk, steps_at, tl.minimum(at + 1, first + count - 1))
        next_key, next_query, next_value, next_factor, next_part = _row(
            next_row, keys, queries, values, factors, times, parts, key_stride, query_stride, value_stride, factor_stride,
            time_stride, part_stride, head, key_head, lane, column, KEY, VALUE, BY, PARTED,
        )  # fmt: skip
        if source >= 0:
            state = tl.load(places + source.to(tl.int64) * size + inside, mask=fits, other=0.0)
        if source == _STATE:
            state = tl.load(states + slot * size + inside, mask=fits, other=0.0)
        state = _decayed(state, factor, decays, BY)
        if PARTED:
            held = tl.sum(state * key[:, None], 0)
            value = (value - held) * part
        state = tl.fma(key[:, None], value[None, :], state)
        read = tl.sum(state * query[:, None], 0)
        tl.store(made + row * (HEADS * VALUE) + head * VALUE + column, read, mask=column < VALUE)
        _put(state, target, saved, slot, states, places, inside, fits, HEADS * KEY * VALUE)
        row = next_row
        source = next_source
        target = next_target
        saved = next_saved
        key = next_key
        query = next_query
        value = next_value
        factor = next_factor
        part = next_part


@triton.jit(do_not_specialize=["row_stride"])
def divide_by_lengths(vectors, made, row_stride, epsilon, SIZE: tl.constexpr, SIZES: tl.constexpr):
    """One vector of [rows, heads, SIZE], a row every ``row_stride`` numbers, divided by its length (SIZES: padded)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, SIZES)
    vector = tl.load(vectors + row * row_stride + head * SIZE + lane, mask=lane < SIZE, other=0.0)
    factor = tl.rsqrt(tl.sum(vector * vector, 0) + epsilon)
    tl.store(made + (row * tl.num_programs(1) + head) * SIZE + lane, vector * factor, mask=lane < SIZE)
