"""One kernel between a layer's first product and its attention: norms of heads, rotary embedding, the write to the cache."""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.held_bytes import store_rounded
from services.verifier.kernels.triton.device.leaves import summed
from services.verifier.kernels.triton.device.row_norm import factor_of, scaled

TILE = tl.constexpr(64)


@triton.jit(do_not_specialize=["slots_at", "apart"])
def rotate_write(
    product, bias, cosine, sine, of_query, of_key, queries, keys, values, key_scales, value_scales, meta, key_strides,
    value_strides, turn_stride, apart, eps, slots_at,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY: tl.constexpr, KEYS: tl.constexpr, VALUE: tl.constexpr,
    VALUES: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr,
    ROUNDED: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of one head: a query is rotated, a key is rotated and stored, and the value with it.

    Values are rounded where transformers' modules round them: the same bits as theirs.

    Args:
        product: [rows, (HEADS + KV_HEADS) * KEY + KV_HEADS * VALUE]: queries, keys, values (``leaves.summed``).
        cosine, sine: [rows, TURNED], one row every ``turn_stride`` numbers. The first half of the first TURNED numbers of a
            head is rotated with the second; the others stay as they are.
        of_query, of_key: [KEY], weights of norms of each head; read if NORMED.
        queries: [rows, HEADS, KEY].
        key_scales, value_scales, meta, slots_at, BYTES, and the pool's strides: as in ``write_rows``.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = row.to(tl.int64) * ((HEADS + KV_HEADS) * KEY + KV_HEADS * VALUE)
    begin = head * KEY
    dims = tl.arange(0, KEYS)
    here = dims < KEY
    turned = dims < TURNED
    first = dims < TURNED // 2
    other = tl.where(first, dims + TURNED // 2, tl.where(turned, dims - TURNED // 2, dims))
    own = summed(product, start + begin + dims, here, apart, bias, begin + dims, queries, PARTS, BIAS)
    beside = summed(product, start + begin + other, here, apart, bias, begin + other, queries, PARTS, BIAS)
    if NORMED:
        # The lanes, and so the order, of ``row_norm.add_and_normalise``.
        lanes = tl.arange(0, BLOCK)
        place = begin + lanes
        whole = summed(product, start + place, lanes < KEY, apart, bias, place, queries, PARTS, BIAS)
        factor = factor_of(tl.fma(whole, whole, tl.zeros((BLOCK,), tl.float32)), KEY, eps)
        weights = of_query
        if head >= HEADS:
            weights = of_key
        weight = tl.load(weights + dims, mask=here, other=0.0).to(tl.float32)
        own = scaled(own, factor, weight, queries, ROUNDED).to(queries.dtype.element_ty).to(tl.float32)
        weight = tl.load(weights + other, mask=here, other=0.0).to(tl.float32)
        beside = scaled(beside, factor, weight, queries, ROUNDED).to(queries.dtype.element_ty).to(tl.float32)
    turn = row.to(tl.int64) * turn_stride + dims
    straight = own * tl.load(cosine + turn, mask=turned, other=1.0).to(tl.float32)
    across = tl.where(first, -beside, beside) * tl.load(sine + turn, mask=turned, other=0.0).to(tl.float32)
    straight = straight.to(queries.dtype.element_ty).to(tl.float32)
    across = across.to(queries.dtype.element_ty).to(tl.float32)
    made = tl.where(turned, straight + across, own).to(queries.dtype.element_ty)
    if head < HEADS:
        tl.store(queries + row.to(tl.int64) * HEADS * KEY + begin + dims, made, mask=here)
    else:
        kv_head = head - HEADS
        slot = tl.load(meta + slots_at + row)
        tile = (slot // TILE).to(tl.int64)
        scale_at = (tile * KV_HEADS + kv_head) * TILE + slot % TILE
        key_at = keys + tile * key_strides[0] + kv_head * key_strides[2] + slot % TILE * key_strides[3]
        value_dims = tl.arange(0, VALUES)
        fits = value_dims < VALUE
        column = (HEADS + KV_HEADS) * KEY + kv_head * VALUE + value_dims
        value = summed(product, start + column, fits, apart, bias, column, queries, PARTS, BIAS)
        value = value.to(queries.dtype.element_ty)
        value_at = values + tile * value_strides[0] + kv_head * value_strides[2] + slot % TILE * value_strides[1]
        if BYTES:
            store_rounded(made, key_at, key_scales + scale_at, KEY, KEYS)
            store_rounded(value, value_at, value_scales + scale_at, VALUE, VALUES)
        else:
            tl.store(key_at + dims * key_strides[1], made, mask=here)
            tl.store(value_at + value_dims, value, mask=fits)
