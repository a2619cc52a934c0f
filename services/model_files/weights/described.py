"""A tensor as the header of a safetensors file describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

# Types that are converted to the model's type, and their bytes.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Types of buffers that a model recomputes, of blocks, and of the codes of quantised weights.
WHOLE = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
# Of blocks, GGUF's and ours, which hold the numbers of some quantised weights.
BLOCKS = {"Q4_0": 18 / 32, "Q8_0": 34 / 32, "Q4_Z": 20 / 32, "Q8_Z": 36 / 32, "E4M3": 36 / 32, "MXFP4": 17 / 32}
BLOCKS |= {"NF4": 20 / 32, "FP4": 20 / 32, "E2M1": 24 / 32, "Q4_H": 24 / 32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as described in the header of a safetensors file.

    Attributes:
        file: the file; None: it is in none, but stands for what others become.
        begin: where its bytes begin there.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    begin: int = 0

    @override
    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def content(self) -> bytes:
        """Its bytes, read from the file now.

        Raises:
            OSError: the file cannot be read.
        """
        if self.file is None:
            return b""
        with self.file.open("rb") as opened:
            opened.seek(self.begin)
            return opened.read(int(self.numbers * self.bytes_each))

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def bytes_each(self) -> float:
        """Bytes per number; 1 for an unknown type."""
        return FLOATS.get(self.dtype) or BLOCKS.get(self.dtype) or WHOLE.get(self.dtype, 1)

    @property
    def bytes_as_stored(self) -> float:
        """Bytes per number in memory, where linear layers multiply by weights as stored and others are float32."""
        return self.bytes_each if self.dtype in (*BLOCKS, "BF16", "U8") else 4
