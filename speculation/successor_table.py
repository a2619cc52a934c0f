"""The likeliest successors of every token, as a file. A retrieval index holds one; token recycling starts from it.

The file is an 8-byte mark, then (little-endian) the vocabulary size and the number of successors as two uint32, then one row
of token ids (uint32) per token. A row that starts with 2^32 - 1 is unknown.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speculation.errors import ConfigurationError
from speculation.files import write_whole

# Name of the file inside an index.
FILE = "successors.bin"

_MARK = b"OUTSUCC1"
_UNKNOWN = np.uint32(0xFFFFFFFF)


class Successors:
    """A table [vocabulary, k] of token ids (uint32), likeliest first."""

    def __init__(self, table: NDArray[np.uint32]) -> None:
        self._table = table

    def after(self, token: int) -> list[int]:
        """The likeliest tokens after ``token``, likeliest first; empty if nothing is known."""
        if not 0 <= token < len(self._table):
            return []
        row = self._table[token]
        return [] if row[0] == _UNKNOWN else row.tolist()


def empty(vocab_size: int, k: int) -> NDArray[np.uint32]:
    """A table [vocab_size, k] in which every row is unknown."""
    return np.full((vocab_size, k), _UNKNOWN, dtype="<u4")


def write(path: Path, table: NDArray[np.uint32]) -> None:
    """Write a table atomically."""
    shape = np.asarray(table.shape, dtype="<u4")
    write_whole(path, _MARK + shape.tobytes() + np.ascontiguousarray(table, dtype="<u4").tobytes())


def read(path: Path) -> Successors:
    """Map a table into memory.

    Raises:
        ConfigurationError: the file cannot be read, is not such a table, or holds ids outside its vocabulary.
    """
    try:
        head = np.fromfile(path, dtype="<u4", count=4)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"cannot read the snapshot {path}: {error.strerror or error}", about=path) from error
    if len(head) < 4 or head[:2].tobytes() != _MARK or size != 16 + 4 * int(head[2]) * int(head[3]) or not head[3]:
        raise ConfigurationError(f"{path} is not a snapshot of successors, or is cut off", about=path)
    table = np.memmap(path, dtype="<u4", mode="r", offset=16, shape=(int(head[2]), int(head[3])))
    if not ((table < head[2]).all(axis=1) | (table == _UNKNOWN).all(axis=1)).all():
        raise ConfigurationError(f"{path} holds token ids beyond its vocabulary", about=path)
    return Successors(table)
