"""How numbers that enter a product are rounded, as our kernels read it; see rounding.h."""

from __future__ import annotations

import ctypes

from services.model_files.weights.rounded_inputs import InputRounding

# The orders of rounding.h. A part of a row must be whole vectors of the widest instruction set.
UNROUNDED, TO_WHOLE, TO_FLOATS, TO_FOUR_BITS = range(4)
_VECTOR = 16


class RoundingStruct(ctypes.Structure):
    """Mirrors ``struct rounding``."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("to", "size", "asymmetric")],
        *[(name, ctypes.c_float) for name in ("scale", "zero", "global_scale")],
        ("power", ctypes.c_int64),
    ]


def rounding_struct(rounding: InputRounding | None) -> RoundingStruct:
    """Of a rounding; None: of none.

    Raises:
        ValueError: the kernels do not round in this way.
    """
    if rounding is None:
        return RoundingStruct(UNROUNDED)
    if (rounding.size or 0) % _VECTOR:
        raise ValueError(f"what enters its products is rounded to {rounding.name}, in a way that our kernels do not have")
    kind = TO_FOUR_BITS if rounding.bits == 4 else TO_FLOATS if rounding.floats else TO_WHOLE
    scale = rounding.scale if rounding.stored else 0.0
    zero = rounding.zero if rounding.stored and not rounding.symmetric else 0.0
    power = rounding.greatest_power if rounding.powers else 0
    return RoundingStruct(kind, rounding.size or 0, not rounding.symmetric, scale, zero, rounding.global_scale or 0.0, power)
