"""A limit on an average rate. By hand: limiters on PyPI cannot owe what is known only afterwards, as an answer's tokens."""

from __future__ import annotations

from collections.abc import Callable


class TokenBucket:
    """Lets ``per_minute`` units pass per minute on average, and at most so many at once.

    What is known only afterwards may be taken without asking (``settle``), so that the bucket can owe.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def resize(self, per_minute: int) -> None:
        """Change the rate; what has been taken stays taken."""
        if per_minute != self.per_minute:
            self._level += per_minute - self.per_minute
            self.per_minute = per_minute

    @property
    def level(self) -> float:
        """Units at hand; negative: owed."""
        now = self._clock()
        refilled = self._level + max(0.0, now - self._at) * self.per_minute / 60
        self._level, self._at = min(float(self.per_minute), refilled), now
        return self._level

    def wait_s(self, units: float) -> float:
        """Seconds until ``units`` can be taken; 0: now. They must not be more than ``per_minute``."""
        return max(0.0, (units - self.level) * 60 / self.per_minute)

    @property
    def full_in_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(self.per_minute)

    def settle(self, units: float) -> None:
        """Take ``units``, or give back negative ones."""
        self._level = min(float(self.per_minute), self.level - units)
