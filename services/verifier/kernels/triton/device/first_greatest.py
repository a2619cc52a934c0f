"""The first of the greatest numbers of each row."""

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
