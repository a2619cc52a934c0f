"""Triton's interpreter, repaired for bfloat16, with the matrix products of an H100.

Triton 3.9 interprets bfloat16 wrongly: ``tl.dot`` and ``*`` multiply the bit patterns as if they were integers, and casts cut
off what they should round. ``hopper`` replaces all three. Its products follow the bit-accurate model of Hopper's matrix units in
microsoft/MMA-Sim (mmasim on PyPI, against which tests/unit/verifier/kernels/test_matrix_units.py holds it): sixteen products and the accumulator
are aligned to the largest exponent among them, where a product's is the sum of its factors' exponents; of each 25 bits behind
the point are kept, the sum is exact, and rounded toward zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

GROUP = 16
# Bits behind the point that are kept of all numbers, under the largest exponent.
_KEPT = 25
# The least exponent of a number in float32 and bfloat16, and the one that zeros count with.
_LEAST, _OF_ZERO = -126, -133


def mma(left: NDArray[Any], right: NDArray[Any], before: NDArray[np.float32], group: int = GROUP) -> NDArray[np.float32]:
    """``before + left @ right``, group after group: [m, k] x [k, n] + [m, n]."""
    total = before.astype(np.float64)
    left, right = left.astype(np.float64), right.astype(np.float64)
    # A product with zero is not to be the largest.
    left_exponents, right_exponents = _exponents(left, -1000), _exponents(right, -1000)
    for start in range(0, left.shape[1], group):
        own = slice(start, start + group)
        largest = (left_exponents[:, own, None] + right_exponents[None, own]).max(1)
        largest = np.maximum(largest, _exponents(total, _OF_ZERO))
        per_unit = np.exp2(_KEPT - largest.astype(np.float64))
        terms = left[:, own, None] * right[None, own]
        terms *= per_unit[:, None]
        exact = np.trunc(terms, out=terms).sum(1)
        exact += np.trunc(total * per_unit)
        exact /= per_unit
        rounded = exact.astype(np.float32)
        beyond = np.abs(rounded.astype(np.float64)) > np.abs(exact)
        total = np.where(beyond, np.nextafter(rounded, np.float32(0)), rounded).astype(np.float64)
    return total.astype(np.float32)


def _exponents(numbers: NDArray[np.float64], of_zero: int) -> NDArray[np.int16]:
    found = np.maximum(np.frexp(numbers)[1] - 1, _LEAST)
    return np.where(numbers == 0, of_zero, found).astype(np.int16)


def to_float(data: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Numbers as the interpreter stores them, bfloat16 as its bits, as numbers."""
    if dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def to_bfloat16(data: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()


@contextmanager
def hopper(group: int = GROUP) -> Iterator[None]:
    """Within the context, the interpreter multiplies as an H100 does; ``group``: of how many terms, for planted faults."""
    cast = interpreter.InterpreterBuilder.cast_impl
    multiply = interpreter.InterpreterBuilder.create_fmul

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
        return TensorHandle(mma(to_float(a.data, a.dtype), to_float(b.data, b.dtype), d.data, group), d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> TensorHandle:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(to_bfloat16(src.data).reshape(src.data.shape), tl.bfloat16)
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return TensorHandle(to_float(src.data, src.dtype), tl.float32)
        return cast(self, src, dst_type)

    def create_fmul(self: Any, lhs: Any, rhs: Any) -> TensorHandle:
        if lhs.dtype.scalar != tl.bfloat16:
            made: TensorHandle = multiply(self, lhs, rhs)
            return made
        product = to_float(lhs.data, lhs.dtype) * to_float(rhs.data, rhs.dtype)
        return TensorHandle(to_bfloat16(product).reshape(product.shape), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter.InterpreterBuilder, "create_fmul", create_fmul)
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
        # Infinities are subtracted on purpose where a row sees nothing; the result is not used.
        with np.errstate(invalid="ignore", over="ignore"):
            yield
