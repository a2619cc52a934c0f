"""Columns of numbers as bytes: one number after the other, little-endian (tree.proto).

As repeated fields, each number would be read and written by itself, which costs more than all else that is done with it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

from speculation.arrays import array_of
from speculation.errors import InvalidArgument

_T = TypeVar("_T")
_SWAPS = sys.byteorder == "big"


def packed(kind: str, numbers: Iterable[float]) -> bytes:
    """A column of numbers of a ``kind`` as ``array`` has it.

    >>> packed("I", [1, 256])
    b'\\x01\\x00\\x00\\x00\\x00\\x01\\x00\\x00'

    Raises:
        ValueError: a number is not of this kind.
    """
    known = numbers.typecode if isinstance(numbers, array) else ""
    signed = kind == "I" and known == "i"
    # What ``array`` takes depends on its kind, which type checkers do not know here.
    given: Any = numbers
    try:
        held: array[Any] = given if signed or known == kind else array_of(kind, given)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    if _SWAPS:
        held = array(held.typecode, held)
        held.byteswap()
    made = held.tobytes()
    if signed and not small(made):
        raise ValueError("a number is negative")
    return made


def unpacked(name: str, kind: str, data: bytes) -> array[Any]:
    """The numbers of a column.

    Raises:
        InvalidArgument: these are no whole numbers of bytes; ``name`` is the column's.
    """
    held = array(kind)
    if len(data) % held.itemsize:
        raise InvalidArgument(name, f"{len(data)} bytes", f"numbers of {held.itemsize} bytes each")
    held.frombytes(data)
    if _SWAPS:
        held.byteswap()
    return held


def small(data: bytes) -> bool:
    """Whether each number of four bytes is below 2^31, so that it is the same with a sign.

    >>> small(packed("I", [5, 2**31 - 1])), small(packed("I", [5, 2**31]))
    (True, False)
    """
    return data[3::4].isascii()


def joined(parts: Iterable[Sequence[_T]]) -> Iterator[_T]:
    """All of them, one after the other."""
    return chain.from_iterable(parts)


def cut(name: str, column: Sequence[_T], counts: Sequence[int]) -> list[tuple[_T, ...]]:
    """A column's entries, as many for each report or draft as ``counts`` say.

    Raises:
        InvalidArgument: these are not as many as there are.
    """
    ends = [0, *accumulate(counts)]
    if ends[-1] != len(column):
        raise InvalidArgument(name, f"{len(column)} entries", f"{ends[-1]}, as they are counted")
    entries = tuple(column)
    return [entries[begin:end] for begin, end in pairwise(ends)]
