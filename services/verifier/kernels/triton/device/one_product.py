"""One product of tiles, to see how a chip adds its terms."""

import triton
import triton.language as tl


@triton.jit
def one_product(left, right, made, ROWS: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr):
    """``made``, [ROWS, COLUMNS], float32, of ``left``, [ROWS, TERMS], and ``right``, [TERMS, COLUMNS]."""
    row, term, column = tl.arange(0, ROWS), tl.arange(0, TERMS), tl.arange(0, COLUMNS)
    first = tl.load(left + row[:, None] * TERMS + term[None, :])
    second = tl.load(right + term[:, None] * COLUMNS + column[None, :])
    made_at = made + row[:, None] * COLUMNS + column[None, :]
    tl.store(made_at, tl.dot(first, second, tl.load(made_at), input_precision="ieee"))
