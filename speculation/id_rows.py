"""Likely ids after the rows of a pass: as many after each, in one array."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

from typing_extensions import override


class IdRows(Sequence[tuple[int, ...]]):
    """The ids after one row after the other. A tuple is made of a row where it is read; equal to what holds equal ones.

    >>> rows = IdRows(array("i", [4, 5, 6, 7]), 2)
    >>> rows[1], rows == ((4, 5), (6, 7)), len(rows)
    ((6, 7), True, 2)

    Attributes:
        ids: of all rows, 32 bits each.
        width: how many there are after each row; at least one.
    """

    __slots__ = ("ids", "width")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ids: array[int], width: int) -> None:
        self.ids, self.width = ids, width

    @override
    def __len__(self) -> int:
        return len(self.ids) // self.width

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, ...]]: ...

    @override
    def __getitem__(self, at: int | slice) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        if isinstance(at, slice):
            return tuple(self)[at]
        row = range(len(self))[at]
        return tuple(self.ids[row * self.width : (row + 1) * self.width])

    @override
    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(*[iter(self.ids)] * self.width, strict=True)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @override
    def __repr__(self) -> str:
        return repr(tuple(self))


def ids_in_one(of_each: Sequence[Sequence[tuple[int, ...]]]) -> Iterable[int]:
    """All ids, row after row."""
    if not all(isinstance(rows, IdRows) or not rows for rows in of_each):
        return chain.from_iterable(chain.from_iterable(of_each))
    found = array("i")
    for rows in of_each:
        if isinstance(rows, IdRows):
            found += rows.ids
    return found


def width_of(rows: Sequence[tuple[int, ...]]) -> int | None:
    """How many ids there are after each row; 0: there are none, None: after some more than after others."""
    if isinstance(rows, IdRows):
        return rows.width
    widths = {*map(len, rows)}
    return None if len(widths) > 1 else max(widths, default=0)
