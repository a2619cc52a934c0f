"""Warnings that a misbehaving peer could repeat a thousand times a second: a line now and then says it, with how often."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

_EVERY_S = 10.0


class SparseLog:
    """Writes at most one line in ten seconds for each of its keys, which must be few.

    Args:
        clock: seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = monotonic) -> None:
        self._log = log
        self._clock = clock
        # Of each key: when a line was written, and how many have not been since.
        self._written: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, message: str, *values: object) -> bool:
        """Write a line, or count it for the next one. Returns whether it was written."""
        at, unwritten = self._written.get(key, (float("-inf"), 0))
        now = self._clock()
        if now - at < _EVERY_S:
            self._written[key] = at, unwritten + 1
            return False
        self._written[key] = now, 0
        more = f" (and {unwritten} more like it since the last line)" if unwritten else ""
        self._log.warning(message + "%s", *values, more)
        return True
