"""Likeliest successors of every token, as a file: an index holds one, and recycling begins with it.

The file is an 8-byte mark, then, little-endian, the vocabulary's size and the number of successors (two uint32), then one
row of token ids (uint32) for each token. A row of the largest id says that nothing is known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speculation.errors import ConfigurationError
from speculation.files import write_whole

# Its name inside an index.
FILE = "successors.bin"

_MARK = b"OUTSUCC1"
_UNKNOWN = np.uint32(0xFFFFFFFF)


class Successors:
    """[vocabulary, k] token ids, likeliest first; rows of unknown tokens are empty."""

    def __init__(self, table: NDArray[np.uint32]) -> None:
        self._table = table

    def after(self, token: int) -> list[int]:
        """What is likely after ``token``."""
        if not 0 <= token < len(self._table):
            return []
        row = self._table[token]
        return [] if row[0] == _UNKNOWN else row.tolist()


def empty(vocab_size: int, k: int) -> NDArray[np.uint32]:
    """A table that knows nothing; [vocab_size, k]."""
    return np.full((vocab_size, k), _UNKNOWN, dtype="<u4")


def write(path: Path, table: NDArray[np.uint32]) -> None:
    """Write a table, whole or not at all."""
    shape = np.asarray(table.shape, dtype="<u4")
    write_whole(path, _MARK + shape.tobytes() + np.ascontiguousarray(table, dtype="<u4").tobytes())


def read(path: Path) -> Successors:
    """Map a table.

    Raises:
        ConfigurationError: it cannot be read, or is not such a file.
    """
    try:
        head = np.fromfile(path, dtype="<u4", count=4)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"cannot read the snapshot {path}: {error.strerror or error}") from error
    if len(head) < 4 or head[:2].tobytes() != _MARK or size != 16 + 4 * int(head[2]) * int(head[3]) or not head[3]:
        raise ConfigurationError(f"{path} is no snapshot of successors, or was cut off")
    table = np.memmap(path, dtype="<u4", mode="r", offset=16, shape=(int(head[2]), int(head[3])))
    if not ((table < head[2]) | (table == _UNKNOWN)).all():
        raise ConfigurationError(f"{path} holds token ids beyond its vocabulary")
    return Successors(table)
