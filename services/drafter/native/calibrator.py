"""The calibrator of suffix decoding and token recycling, with its weights where compiled code finds them; see blend.c."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, MutableMapping

from typing_extensions import override

from services.drafter.merging.calibrator import Calibrator, first_weight
from services.drafter.sources import recycling, suffix

_STEMS = [dict.fromkeys(kind.rpartition(":")[0] for kind in source.PRIOR) for source in (suffix, recycling)]
# In the order of blend.h.
KINDS = (*suffix.PRIOR, *recycling.PRIOR, *(f"{one}+{other}" for one in _STEMS[0] for other in _STEMS[1]))
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_FIRST = array("d", map(first_weight, KINDS))


class CompiledCalibrator(Calibrator):
    """A ``Calibrator`` without models.

    Attributes:
        weights, squares: addresses of one double for each of ``KINDS``.
    """

    def __init__(self, prior: Mapping[str, float]) -> None:
        super().__init__(prior)
        first = array("d", _FIRST)
        for kind in self._weights.keys() & _NUMBERS:
            first[_NUMBERS[kind]] = self._weights[kind]
        weights = _Numbered(first)
        squares = _Numbered(array("d", [1.0] * len(KINDS)))
        self._weights, self._squares = weights, squares
        self.weights, self.squares = weights.address, squares.address


class _Numbered(MutableMapping[str, float]):
    """Numbers by kind, in an array. It holds those that were changed, and tells all."""

    def __init__(self, numbers: array[float]) -> None:
        self._numbers, self._first = numbers, array("d", numbers)
        self.address = numbers.buffer_info()[0]

    @override
    def __getitem__(self, kind: str) -> float:
        return self._numbers[_NUMBERS[kind]]

    @override
    def __setitem__(self, kind: str, number: float) -> None:
        # A file may hold kinds that other sources once had.
        if kind in _NUMBERS:
            self._numbers[_NUMBERS[kind]] = number

    @override
    def __delitem__(self, kind: str) -> None:
        self[kind] = self._first[_NUMBERS[kind]]

    @override
    def __iter__(self) -> Iterator[str]:
        return (kind for kind, now, first in zip(KINDS, self._numbers, self._first, strict=True) if now != first)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)
