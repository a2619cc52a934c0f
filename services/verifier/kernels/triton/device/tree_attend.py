"""Tree attention over the paged KV cache. The order of a row's sums depends on the row's position alone.

By absolute positions: *segments* of 512 start from nothing and are merged in ascending order. Within a segment, *tiles* of
64 are added one after the other, each of them four *groups* of 16. On Hopper a matrix product adds group after group; within
a group the order does not matter, zeros change nothing, and a group of zeros is the identity (microsoft/MMA-Sim, a
bit-accurate model). So a row may find its 16 positions in any lanes of a group, among lanes that it does not see, and may
skip groups and tiles in which it sees nothing.

What a compiler might contract in one kernel and not in another is written as ``fma``.

Besides keys and values a pass reads one array of int32, ``meta``; services.verifier.kernels.triton.pass_meta describes it.
"""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.held_bytes import widened

TILE = tl.constexpr(64)
SEGMENT_TILES = tl.constexpr(8)
# Ints of a block's record, and of a chunk's: 64 slots, then their positions.
BLOCK_INTS = tl.constexpr(4)
CHUNK_INTS = tl.constexpr(128)
# How much blocks of many rows do without on Hopper, so that their sums stay in registers. SOME: places that chunks of trees
# have in common are computed for each. MOST: those of tiles, too, and chunks are not copied ahead. No bit depends on it.
SOME, MOST = tl.constexpr(1), tl.constexpr(2)
# Lanes of values from which on a block that keeps the sums of one segment alone spares nothing.
MANY_LANES = tl.constexpr(256)
# Segments that ``merge`` reads at once.
AHEAD = tl.constexpr(16)


@triton.jit
def _scores(query, keys, at, lanes_at, seen, cap, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr):
    """Scores of 64 slots, [rows, 64], float32, -inf where a row does not see; unscaled, unless they are capped.

    ``at`` and ``lanes_at`` are the positions of the rows and of the slots; ``cap`` holds scale / softcap and softcap.
    """
    scores = tl.dot(query, keys, input_precision="ieee")
    if CAPPED:
        grown = tl.exp2(scores * (cap[0] * 2.8853900817779268))
        scores = (1.0 - 2.0 / (grown + 1.0)) * cap[1]
    if WINDOW > 0:
        seen = seen & (at[:, None] - lanes_at[None, :] < WINDOW)
    if CHUNK > 0:
        seen = seen & (lanes_at[None, :] >= (at - at % CHUNK)[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _factor(old, new, unit):
    """By what sums under the maximum ``old`` are multiplied under ``new``; one where nothing has been seen."""
    return tl.where(old == new, 1.0, tl.exp2((old - new) * unit))


@triton.jit
def _raised(top, new, total, sums, unit):
    factor = _factor(top, new, unit)
    return total * factor[:, None], sums * factor[:, None]


@triton.jit
def _add(scores, top, total, sums, values, unit):
    """Add the weights of 64 slots to ``total``, [rows, 16] of one number each, and their weighted values to ``sums``."""
    base = tl.where(top == float("-inf"), 0.0, top * unit)
    weights = tl.exp2(tl.fma(scores, unit, -base[:, None])).to(values.dtype)
    # Not tl.sum, whose order follows from lanes: these sums have the groups of the values' sums.
    total = tl.dot(weights, tl.full((64, 16), 1.0, values.dtype), total, input_precision="ieee")
    return total, tl.dot(weights, values, sums, input_precision="ieee")


@triton.jit
def _keys(keys, places, dims, scales, scales_at, query, KEY: tl.constexpr, BYTES: tl.constexpr):
    """Keys of 64 slots, [dimensions, 64], from their ``places``; ``scales_at``: those of the slots, read if BYTES."""
    read = tl.load(keys + places, mask=dims[:, None] < KEY, other=0)
    if BYTES:
        read = widened(read, dims[:, None] < KEY // 2, tl.load(scales + scales_at)[None, :], query)
    return read


@triton.jit
def _values(values, places, dims, scales, scales_at, query, VALUE: tl.constexpr, BYTES: tl.constexpr):
    """Values of 64 slots, [64, dimensions], as ``_keys``."""
    read = tl.load(values + places, mask=dims[None, :] < VALUE, other=0)
    if BYTES:
        read = widened(read, dims[None, :] < VALUE // 2, tl.load(scales + scales_at)[:, None], query)
    return read


@triton.jit
def _segment(
    segment, query, at, lowest, last, meta, request, row, keys_of_head, values_of_head, key_scales, value_scales,
    key_strides, value_strides, unit, cap,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr, KEYS: tl.constexpr, VALUE: tl.constexpr,
    VALUES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, BYTES: tl.constexpr,
    SPARING: tl.constexpr,
):  # fmt: skip
    """One segment's maximum, sum of weights and weighted sum for a block of rows.

    ``lowest`` and ``last``: the positions between which some row sees something. ``row``: numbers of the rows in their
    request. ``key_scales``, ``value_scales``: the head's. ``SPARING``: SOME or MOST; 0: nothing.
    """
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK, 16), tl.float32)
    sums = tl.zeros((BLOCK, VALUES), tl.float32)
    lanes = tl.arange(0, TILE)
    key_dims = tl.arange(0, KEYS)
    value_dims = tl.arange(0, VALUES)
    key_at = key_dims % (KEY // 2) if BYTES else key_dims
    value_at = value_dims % (VALUE // 2) if BYTES else value_dims
    table = tl.load(meta + request + 2)
    tail_tile = tl.load(meta + request + 3)
    tail = tl.load(meta + request + 4)
    chunks_at = tl.load(meta + request + 5)
    words_at = tl.load(meta + request + 6)
    words = tl.load(meta + request + 7)
    first = tl.maximum(segment * SEGMENT_TILES, lowest // TILE)
    stop = tl.minimum((segment + 1) * SEGMENT_TILES, last // TILE + 1)
    for tile in tl.range(first, tl.minimum(stop, tail_tile), disable_licm=SPARING == MOST):
        pool_tile = tl.load(meta + table + tile).to(tl.int64)
        lanes_at = tile * TILE + lanes
        places = pool_tile * key_strides[0] + key_at[:, None] * key_strides[1] + lanes[None, :] * key_strides[3]
        scales_at = pool_tile * (KV_HEADS * TILE) + lanes
        keys = _keys(keys_of_head, places, key_dims, key_scales, scales_at, query, KEY, BYTES)
        seen = lanes_at[None, :] <= at[:, None]
        scores = _scores(query, keys, at, lanes_at, seen, cap, WINDOW, CHUNK, CAPPED)
        new = tl.maximum(top, tl.max(scores, 1))
        total, sums = _raised(top, new, total, sums, unit)
        top = new
        places = pool_tile * value_strides[0] + lanes[:, None] * value_strides[1] + value_at[None, :]
        values = _values(values_of_head, places, value_dims, value_scales, scales_at, query, VALUE, BYTES)
        total, sums = _add(scores, top, total, sums, values, unit)
    for tile in range(tl.maximum(first, tail_tile), stop):
        begin = tl.load(meta + tail + tile - tail_tile)
        end = tl.load(meta + tail + tile - tail_tile + 1)
        # All copies of a tile's groups share a maximum, which takes a turn of its own.
        new = top
        for turn in tl.static_range(2):
            if turn == 1:
                total, sums = _raised(top, new, total, sums, unit)
                top = new
            for chunk in tl.range(begin, end, num_stages=1 if SPARING == MOST else None, disable_licm=SPARING > 0):
                slots = tl.load(meta + chunks_at + chunk * CHUNK_INTS + lanes)
                lanes_at = tl.load(meta + chunks_at + chunk * CHUNK_INTS + TILE + lanes)
                # Two words of a row, not one for each of its slots, which would take registers that sums need.
                word = meta + words_at + row * words + chunk * 2
                word = tl.where(lanes[None, :] < 32, tl.load(word)[:, None], tl.load(word + 1)[:, None])
                seen = ((word >> (lanes % 32)[None, :]) & 1) != 0
                pool_tiles = (slots // TILE).to(tl.int64)
                places = pool_tiles * key_strides[0] + slots % TILE * key_strides[3]
                places = places[None, :] + key_at[:, None] * key_strides[1]
                scales_at = pool_tiles * (KV_HEADS * TILE) + slots % TILE
                keys = _keys(keys_of_head, places, key_dims, key_scales, scales_at, query, KEY, BYTES)
                scores = _scores(query, keys, at, lanes_at, seen, cap, WINDOW, CHUNK, CAPPED)
                if turn == 0:
                    new = tl.maximum(new, tl.max(scores, 1))
                else:
                    places = pool_tiles * value_strides[0] + slots % TILE * value_strides[1]
                    places = places[:, None] + value_at[None, :]
                    values = _values(values_of_head, places, value_dims, value_scales, scales_at, query, VALUE, BYTES)
                    total, sums = _add(scores, top, total, sums, values, unit)
    return top, tl.max(total, 1), sums


@triton.jit
def _merged(top, total, sums, next_top, next_total, next_sums, unit):
    """The sums of the segments so far and of the next one."""
    new = tl.maximum(top, next_top)
    old_factor = _factor(top, new, unit)
    next_factor = _factor(next_top, new, unit)
    total = tl.fma(total, old_factor, next_total * next_factor)
    return new, total, tl.fma(sums, old_factor[:, None], next_sums * next_factor[:, None])


@triton.jit
def _divided(top, total, sums, sink, unit, SINKS: tl.constexpr):
    """The result; ``sink`` is the score of a further key without a value, times log2(e)."""
    if SINKS:
        base = top * unit
        most = tl.maximum(base, sink)
        factor = tl.exp2(base - most)
        total = tl.fma(total, factor, tl.exp2(sink - most))
        sums = sums * factor[:, None]
    return sums / total[:, None]


@triton.jit
def _lowest(at, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that rows at positions ``at`` see."""
    lowest = at * 0
    if WINDOW > 0:
        lowest = tl.maximum(lowest, at - WINDOW + 1)
    if CHUNK > 0:
        lowest = tl.maximum(lowest, at - at % CHUNK)
    return lowest


@triton.jit
def _lanes(record, meta, kv_head, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    """Of each lane of a block: whether it has a row, this row's number in its request and in the pass, and its head."""
    lane = tl.arange(0, BLOCK)
    rows = tl.load(record + 2)
    # Superfluous lanes repeat the block's last row.
    row = tl.load(record + 1) + tl.minimum(lane // SHARE, rows - 1)
    return lane // SHARE < rows, row, tl.load(meta + tl.load(record)) + row, kv_head * SHARE + lane % SHARE


# Numbers that differ from pass to pass: the kernels must not be compiled anew for special ones.
@triton.jit(do_not_specialize=["sums_at", "blocks_at", "work_at"])
def attend(
    query, keys, values, key_scales, value_scales, made, tops, totals, partial, sinks, meta, query_strides, key_strides,
    value_strides, unit, cap, sums_at, blocks_at, work_at,
    SHARE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr, KEYS: tl.constexpr,
    VALUE: tl.constexpr, VALUES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SPLIT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Blocks of requests' rows, for one key-value head: one segment of each part of the work if SPLIT, else all of a block.

    As many programs as the grid has share the work, whatever there is of it.

    Args:
        query: [heads, rows, KEY], by ``query_strides`` (head, row).
        keys, values: a call's part of the pool; ``key_strides`` (tile, dimension, head, slot), ``value_strides`` (tile,
            slot, head). On a GPU a key's dimensions lie side by side, so that 16 bytes are read at a time. If BYTES, these
            are bytes in pairs, int16 (``held_bytes``).
        key_scales, value_scales: [tiles, HEADS // SHARE, TILE], float32; read if BYTES.
        made: [rows, HEADS, VALUE].
        tops, totals, partial: the sums of segments, float32, written if SPLIT: of all rows, one behind the other, by head
            and segment of the row; the last one with VALUE numbers each.
        sinks: [HEADS], float32; read if SINKS.
        unit: what a score is multiplied by to get the exponent of two.
        sums_at, blocks_at, work_at: where these begin in ``meta``.
    """
    # Ampere's other products take their operands from registers, and spill more where they are spared so.
    SPARES: tl.constexpr = BLOCK >= TILE and tl.target_info.cuda_capability_geq(9, 0)
    SPARING: tl.constexpr = (0 if VALUES >= MANY_LANES else SOME) if SPLIT else MOST
    kv_head = tl.program_id(1)
    parts = meta + tl.load(meta + work_at + 1)
    # What parts have in common is computed for each of them: kept over the loop, it would take registers that sums need.
    for part in tl.range(tl.program_id(0), tl.load(meta + work_at), tl.num_programs(0), disable_licm=True):
        own_keys = keys + kv_head * key_strides[2]
        own_values = values + kv_head * value_strides[2]
        own_key_scales = key_scales + kv_head * TILE
        own_value_scales = value_scales + kv_head * TILE
        dims = tl.arange(0, KEYS)
        value_dims = tl.arange(0, VALUES)
        block = tl.load(parts + 2 * part) if SPLIT else part
        record = meta + blocks_at + block * BLOCK_INTS
        request = tl.load(record)
        last = tl.load(record + 3)
        here, row, pass_row, head = _lanes(record, meta, kv_head, SHARE, BLOCK)
        at = tl.load(meta + pass_row)
        lowest = tl.min(_lowest(at, WINDOW, CHUNK), 0)
        queries = tl.load(
            query + head[:, None] * query_strides[0] + pass_row[:, None] * query_strides[1] + dims[None, :],
            mask=here[:, None] & (dims[None, :] < KEY), other=0.0,
        )  # fmt: skip
        if SPLIT:
            segment = tl.load(parts + 2 * part + 1)
            if segment >= lowest // (TILE * SEGMENT_TILES):
                top, total, sums = _segment(
                    segment, queries, at, lowest, last, meta, request, row, own_keys, own_values, own_key_scales,
                    own_value_scales, key_strides, value_strides, unit, cap, HEADS // SHARE, BLOCK, KEY, KEYS, VALUE,
                    VALUES, WINDOW, CHUNK, CAPPED, BYTES, SPARING if SPARES else 0,
                )  # fmt: skip
                # Once more, rather than kept where registers are few.
                here, row, pass_row, head = _lanes(record, meta, kv_head, SHARE, BLOCK)
                segments = tl.load(meta + pass_row) // (TILE * SEGMENT_TILES) + 1
                place = tl.load(meta + sums_at + pass_row).to(tl.int64) * HEADS + head * segments + segment
                # The block's other rows may have more segments.
                there = here & (segment < segments)
                tl.store(tops + place, top, mask=there)
                tl.store(totals + place, total, mask=there)
                fits = there[:, None] & (value_dims[None, :] < VALUE)
                tl.store(partial + place[:, None] * VALUE + value_dims[None, :], sums, mask=fits)
        else:
            top = tl.full((BLOCK,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK,), tl.float32)
            sums = tl.zeros((BLOCK, VALUES), tl.float32)
            for segment in range(lowest // (TILE * SEGMENT_TILES), last // (TILE * SEGMENT_TILES) + 1):
                next_top, next_total, next_sums = _segment(
                    segment, queries, at, lowest, last, meta, request, row, own_keys, own_values, own_key_scales,
                    own_value_scales, key_strides, value_strides, unit, cap, HEADS // SHARE, BLOCK, KEY, KEYS, VALUE,
                    VALUES, WINDOW, CHUNK, CAPPED, BYTES, SPARING if SPARES else 0,
                )  # fmt: skip
                top, total, sums = _merged(top, total, sums, next_top, next_total, next_sums, unit)
            here, row, pass_row, head = _lanes(record, meta, kv_head, SHARE, BLOCK)
            sink = tl.load(sinks + head) * 1.4426950408889634 if SINKS else 0.0
            result = _divided(top, total, sums, sink, unit, SINKS)
            place = pass_row * HEADS + head
            fits = here[:, None] & (value_dims[None, :] < VALUE)
            tl.store(made + place[:, None] * VALUE + value_dims[None, :], result.to(made.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["sums_at"])
def merge(
    made, tops, totals, partial, sinks, meta, unit, sums_at,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the segments of one row and head, in ascending order; arguments as in ``attend``.

    Only the order of sums is serial. What they are made of is read for AHEAD segments at once, so that a long context waits
    for memory once in AHEAD segments.
    """
    row = tl.program_id(0)
    at = tl.load(meta + row)
    # A list of one, since segments are merged for several rows in ``attend``.
    lane = tl.arange(0, 1)
    head = tl.program_id(1) + lane
    dims = tl.arange(0, VALUES)
    fits = dims[None, :] < VALUE
    end = at // (TILE * SEGMENT_TILES) + 1
    own = tl.load(meta + sums_at + row).to(tl.int64) * HEADS + head * end
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, VALUES), tl.float32)
    for begin in range(_lowest(at, WINDOW, CHUNK) // (TILE * SEGMENT_TILES), end, AHEAD):
        next_tops = ()
        next_totals = ()
        next_sums = ()
        for ahead in tl.static_range(AHEAD):
            part = own + begin + ahead
            there = begin + ahead + lane < end
            # Behind the last segment: what changes no bit of the sums, the sign of a zero included.
            next_tops += (tl.load(tops + part, mask=there, other=float("-inf")),)
            next_totals += (tl.load(totals + part, mask=there, other=0.0),)
            next_sums += (tl.load(partial + part[:, None] * VALUE + dims[None, :], mask=there[:, None] & fits, other=-0.0),)
        for ahead in tl.static_range(AHEAD):
            top, total, sums = _merged(top, total, sums, next_tops[ahead], next_totals[ahead], next_sums[ahead], unit)
    sink = tl.load(sinks + head) * 1.4426950408889634 if SINKS else 0.0
    result = _divided(top, total, sums, sink, unit, SINKS)
    place = row * HEADS + head
    tl.store(made + place[:, None] * VALUE + dims[None, :], result.to(made.dtype.element_ty), mask=fits)
