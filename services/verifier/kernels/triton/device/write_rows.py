"""The write of keys and values into the paged KV cache, row by row."""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.held_bytes import store_rounded

TILE = tl.constexpr(64)


@triton.jit(do_not_specialize=["slots_at"])
def write_rows(
    key, value, keys, values, key_scales, value_scales, meta, in_strides, key_strides, value_strides, slots_at,
    KEY: tl.constexpr, KEYS: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Write one row's key and value of one head to the slot that ``meta`` holds for it at ``slots_at``.

    Args:
        keys, values: the pool's, by the strides of ``tree_attend.attend``; bytes if BYTES.
        key_scales, value_scales: [tiles, heads, TILE], float32; written if BYTES.
        in_strides: of ``key`` (head, row), then of ``value``.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(meta + slots_at + row)
    tile = (slot // TILE).to(tl.int64)
    scale_at = (tile * tl.num_programs(1) + head) * TILE + slot % TILE
    dims = tl.arange(0, KEYS)
    own = tl.load(key + head * in_strides[0] + row * in_strides[1] + dims, mask=dims < KEY)
    place = tile * key_strides[0] + head * key_strides[2] + slot % TILE * key_strides[3]
    if BYTES:
        store_rounded(own, keys + place, key_scales + scale_at, KEY, KEYS)
    else:
        tl.store(keys + place + dims * key_strides[1], own, mask=dims < KEY)
    dims = tl.arange(0, VALUES)
    own = tl.load(value + head * in_strides[2] + row * in_strides[3] + dims, mask=dims < VALUE)
    place = tile * value_strides[0] + head * value_strides[2] + slot % TILE * value_strides[1]
    if BYTES:
        store_rounded(own, values + place, value_scales + scale_at, VALUE, VALUES)
    else:
        tl.store(values + place + dims, own, mask=dims < VALUE)
