"""A tensor as the header of a safetensors file describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Types that are converted to the model's type, and their bytes.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Types of buffers that a model recomputes, of blocks, and of the codes of quantised weights.
WHOLE = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as described in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def bytes_each(self) -> int:
        """Bytes per number; 1 for an unknown type."""
        return FLOATS.get(self.dtype) or WHOLE.get(self.dtype, 1)
