"""How numbers that enter a product are rounded, as our kernels read it; see rounding.h."""

from __future__ import annotations

import ctypes

from services.model_files.weights.rounded_inputs import InputRounding

# The orders of rounding.h. A part of a row must be whole vectors of the widest instruction set.
UNROUNDED, TO_WHOLE, TO_FLOATS = range(3)
_VECTOR = 16


class RoundingStruct(ctypes.Structure):
    """Mirrors ``struct rounding``."""

    _fields_ = [("to", ctypes.c_int64), ("size", ctypes.c_int64), ("scale", ctypes.c_float)]


def rounding_struct(rounding: InputRounding | None) -> RoundingStruct:
    """Of a rounding; None: of none.

    Raises:
        ValueError: the kernels do not round in this way.
    """
    if rounding is None:
        return RoundingStruct(UNROUNDED, 0, 0.0)
    if not rounding.symmetric or (rounding.size or 0) % _VECTOR:
        raise ValueError(f"what enters its products is rounded to {rounding.name}, in a way that our kernels do not have")
    kind = TO_FLOATS if rounding.floats else TO_WHOLE
    return RoundingStruct(kind, rounding.size or 0, rounding.scale if rounding.stored else 0.0)
