"""The cost of a pass: measured at start, corrected while running (docs/decisions.md, "What is measured, and how")."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from speculation.records import quickly_made

# Weights of a new measurement in the machine's present speed, and in the shape of the table: the speed of a shared machine
# changes within seconds, the shape only with its clock rates.
_SPEED_WEIGHT = 0.2
_SHAPE_WEIGHT = 0.02
# An entry of the table moves towards a measurement as if that differed by at most this share of the entry.
_MOST_SURPRISE = 0.1
# A pass counts as at most so many times slower or faster than expected: one that was interrupted says little about the next.
_MOST_SLOWER = 4.0


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a pass holds.

    Attributes:
        rows: token rows of all requests.
        requests: number of requests.
        keys: committed tokens that the rows attend to, summed over requests.
        row_keys: rows times keys of each request, summed over requests.
    """

    rows: int
    requests: int
    keys: int
    row_keys: int = 0

    def plus(self, rows: int) -> Load:
        """The same load with ``rows`` more rows, spread evenly over its requests."""
        more = rows * self.keys // max(1, self.requests)
        return Load(rows=self.rows + rows, requests=self.requests, keys=self.keys, row_keys=self.row_keys + more)

    def together(self, other: Load) -> Load:
        """The load of both in one pass."""
        return Load(
            rows=self.rows + other.rows,
            requests=self.requests + other.requests,
            keys=self.keys + other.keys,
            row_keys=self.row_keys + other.row_keys,
        )

    def plus_request(self, rows: int, keys: int) -> Load:
        """The same load with one more request."""
        return Load(
            rows=self.rows + rows,
            requests=self.requests + 1,
            keys=self.keys + keys,
            row_keys=self.row_keys + rows * keys,
        )


class CostTable:
    """Seconds of a pass: a table by rows, plus linear terms for further requests, keys, and rows times keys.

    Args:
        by_rows: seconds of a pass of one request, by its number of rows; at least one entry.
        per_request: seconds that each further request adds, besides its rows.
        per_key: seconds that reading one committed token adds.
        per_row_key: seconds that each pair of a row and a committed token adds.
    """

    def __init__(
        self, *, by_rows: Mapping[int, float], per_request: float, per_key: float, per_row_key: float = 0.0
    ) -> None:
        self._rows = sorted(by_rows)
        self._seconds = [by_rows[rows] for rows in self._rows]
        # More rows never cost less. A measurement that says so is noise, and would make rows look free.
        for index in range(1, len(self._seconds)):
            self._seconds[index] = max(self._seconds[index], self._seconds[index - 1])
        self._per_request = max(0.0, per_request)
        self._per_key = max(0.0, per_key)
        self._per_row_key = max(0.0, per_row_key)
        self._speed = 1.0

    @property
    def terms(self) -> tuple[Sequence[int], Sequence[float], tuple[float, float, float, float]]:
        """The table's rows and seconds; the machine's speed as a factor, and the other terms in the arguments' order."""
        return self._rows, self._seconds, (self._speed, self._per_request, self._per_key, self._per_row_key)

    def seconds(self, load: Load) -> float:
        """The expected duration of a pass, on the machine as it is now."""
        return self._speed * self._at_full_speed(load)

    def learn(self, load: Load, seconds: float) -> None:
        """Learn how long a pass took.

        A shared machine is slower at times, for all loads alike. Most of a deviation is therefore booked as the machine's
        speed; what remains corrects the table's entry for that number of rows.

        Both are close to ``DecayingMean``. The speed is a factor, so it is the logarithm of which the mean decays. An entry
        is one term of a sum, so what is averaged is the sum's error.
        """
        expected = self._at_full_speed(load)
        self._speed *= slowdown(seconds, self._speed * expected) ** _SPEED_WEIGHT
        surprise = seconds / self._speed - expected
        index = min(bisect_left(self._rows, load.rows), len(self._rows) - 1)
        bound = _MOST_SURPRISE * self._seconds[index]
        self._seconds[index] += _SHAPE_WEIGHT * min(bound, max(-bound, surprise))

    def _at_full_speed(self, load: Load) -> float:
        requests = self._per_request * max(0, load.requests - 1)
        return self.of_rows(load.rows) + requests + self._per_key * load.keys + self._per_row_key * load.row_keys

    def of_rows(self, rows: int) -> float:
        """Seconds of a pass of one request without keys, interpolated linearly between measured points and beyond them."""
        known, seconds = self._rows, self._seconds
        if len(known) == 1 or rows <= known[0]:
            return seconds[0]
        right = min(max(1, bisect_left(known, rows)), len(known) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (known[right] - known[right - 1])
        return seconds[right - 1] + max(0.0, slope) * (rows - known[right - 1])

    def as_object(self) -> dict[str, Any]:
        """Plain numbers, for a file."""
        by_rows = dict(zip(map(str, self._rows), self._seconds, strict=True))
        return {
            "by_rows": by_rows,
            "per_request": self._per_request,
            "per_key": self._per_key,
            "per_row_key": self._per_row_key,
        }

    @classmethod
    def from_object(cls, content: Any) -> Self:
        """The inverse of ``as_object``.

        Raises:
            ValueError: ``content`` is no cost table.
        """
        try:
            by_rows = {int(rows): float(seconds) for rows, seconds in content["by_rows"].items()}
            others = {name: float(content[name]) for name in ("per_request", "per_key", "per_row_key")}
            table = cls(by_rows=by_rows, **others)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost table ({error!r})") from error
        if not by_rows or not all(rows > 0 and 0 < seconds < 3600 for rows, seconds in by_rows.items()):
            raise ValueError("not a cost table: rows and seconds must be above 0")
        return table


def slowdown(seconds: float, expected_s: float) -> float:
    """How many times longer than expected a pass took, within what is believed."""
    return min(_MOST_SLOWER, max(1 / _MOST_SLOWER, seconds / expected_s))
