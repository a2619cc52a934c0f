"""Lines that a misbehaving peer could cause a thousand times a second: one is written now and then, with their number."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

_EVERY_S = 10.0


class SparseLog:
    """Writes at most one line in a while for each of its keys, which must be few.

    Args:
        every_s: that while, in seconds.
        clock: seconds, never going back.
    """

    def __init__(self, log: logging.Logger, *, every_s: float = _EVERY_S, clock: Callable[[], float] = monotonic) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        # Of each key: when a line was written, and how many have not been since.
        self._written: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, message: str, *values: object) -> bool:
        """Write a line, or count it for the next one. Returns whether it was written."""
        return self._write(logging.WARNING, key, message, values)

    def error(self, key: str, message: str, *values: object) -> bool:
        """The same, where lines below errors may not be shown."""
        return self._write(logging.ERROR, key, message, values)

    def _write(self, level: int, key: str, message: str, values: tuple[object, ...]) -> bool:
        at, unwritten = self._written.get(key, (float("-inf"), 0))
        now = self._clock()
        if now - at < self._every_s:
            self._written[key] = at, unwritten + 1
            return False
        self._written[key] = now, 0
        more = f" (and {unwritten} more like it since the last line)" if unwritten else ""
        self._log.log(level, message + "%s", *values, more)
        return True
