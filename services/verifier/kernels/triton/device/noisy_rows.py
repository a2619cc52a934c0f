"""Chooses a token of each row: the first of the greatest logits, or the winner under the noise of speculation/choose.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "parts"])
def first_greatest(
    numbers, places, tops, firsts, count, parts, PLACED: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest of at most BLOCK numbers of a row, and the least place of those that equal it. NaN counts as infinite.

    Args:
        numbers: [rows, count], float32 or bfloat16.
        places: the same, int64, ascending; read if ``PLACED``, else columns are places.
        tops: [rows, parts], float32. firsts: the same, int64.
        LAST: this is the whole row: its place is -1 if its greatest number is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < count
    own = tl.load(numbers + row * count + column, mask=inside, other=float("-inf")).to(tl.float32)
    own = tl.where(own == own, own, float("inf"))
    top = tl.max(own, 0)
    place = column.to(tl.int64)
    if PLACED:
        place = tl.load(places + row * count + column, mask=inside, other=0)
    # Lanes outside equal a top of -inf alone, after which nothing is found anyhow.
    first = tl.min(tl.where(own == top, place, 9223372036854775807), 0)
    if LAST:
        first = tl.where((top > float("-inf")) & (top < float("inf")), first, -1)
    tl.store(tops + row * parts + part, top)
    tl.store(firsts + row * parts + part, first)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 (Salmon et al., SC'11), the integers of speculation/philox.py; all uint32."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _noisy(logits, row_start, token, vocabulary, word, perhaps):
    """Logit plus noise, float64; -inf for tokens that are not left."""
    here = (token >= 0) & (token < vocabulary)
    value = tl.load(logits + row_start + token, mask=here, other=float("-inf")).to(tl.float64)
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noisy = value - tl.log(-tl.log(uniform))
    return tl.where(here & (value >= perhaps), noisy, float("-inf"))


@triton.jit(do_not_specialize=["vocabulary", "first"])
def noisy_rows(
    logits, limits, keys, tops, ids, seconds, vocabulary, parts, first, STREAM: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest logit plus noise among 4 * BLOCK tokens of a row, its column, and the second greatest.

    Args:
        logits: [rows, vocabulary], float32 or float64.
        limits: [rows], float64; lesser logits do not take part.
        keys: [rows, 4], int64: the seed's lower and upper half, the position's lower and upper half.
        tops, seconds: [rows, parts], float64. ids: the same, int64.
        first: the token of the first column, which has the second word of its block if it is 4 n + 1, and so on.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    block = part * BLOCK + lane
    k0 = tl.load(keys + row * 4).to(tl.uint32)
    k1 = tl.load(keys + row * 4 + 1).to(tl.uint32)
    c0 = (first // 4 + block).to(tl.uint32)
    zero = c0 * 0
    c2 = zero + tl.load(keys + row * 4 + 2).to(tl.uint32)
    c3 = zero + tl.load(keys + row * 4 + 3).to(tl.uint32)
    w0, w1, w2, w3 = _philox(c0, zero + STREAM, c2, c3, zero + k0, zero + k1)
    perhaps = tl.load(limits + row)
    start = row * vocabulary
    top = tl.full((BLOCK,), float("-inf"), tl.float64)
    second = tl.full((BLOCK,), float("-inf"), tl.float64)
    begin = block * 4 - first % 4
    best = begin
    # Written out: a program has no arrays of registers.
    noisy = _noisy(logits, start, begin, vocabulary, w0, perhaps)
    top = noisy
    noisy = _noisy(logits, start, begin + 1, vocabulary, w1, perhaps)
    second = tl.minimum(top, noisy)
    best = tl.where(noisy > top, begin + 1, best)
    top = tl.maximum(top, noisy)
    noisy = _noisy(logits, start, begin + 2, vocabulary, w2, perhaps)
    second = tl.maximum(second, tl.minimum(top, noisy))
    best = tl.where(noisy > top, begin + 2, best)
    top = tl.maximum(top, noisy)
    noisy = _noisy(logits, start, begin + 3, vocabulary, w3, perhaps)
    second = tl.maximum(second, tl.minimum(top, noisy))
    best = tl.where(noisy > top, begin + 3, best)
    top = tl.maximum(top, noisy)
    most = tl.max(top, 0)
    winner = tl.min(tl.where(top == most, best, 2147483647), 0)
    others = tl.max(tl.where(best == winner, second, top), 0)
    place = row * parts + part
    tl.store(tops + place, most)
    tl.store(ids + place, winner.to(tl.int64))
    tl.store(seconds + place, others)
