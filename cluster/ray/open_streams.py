"""Counts this process's open streams at each verifier.

Ray Serve's own counts cannot be used. They contain calls other than streams. And if a verifier's answer to one call
overtakes the end of another, they are one too high until something is sent to it again (seen with Ray 2.60).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class OpenStreams:
    """Counts streams by verifier. Its methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._places: dict[str, Hashable | None] = {}

    @contextmanager
    def opened(self) -> Iterator[str]:
        """Count a stream during the block, or until it is ``ended``; yields its name."""
        with self._lock:
            name = str(next(self._numbers))
            self._places[name] = None
        try:
            yield name
        finally:
            self.ended(name)

    def placed(self, stream: str, verifier: Hashable) -> None:
        """Note where a stream goes. One that has ended meanwhile goes nowhere."""
        with self._lock:
            if stream in self._places:
                self._places[stream] = verifier

    def ended(self, stream: str) -> None:
        """Count a stream no longer."""
        with self._lock:
            self._places.pop(stream, None)

    def at(self, verifier: Hashable) -> int:
        """Open streams at a verifier."""
        with self._lock:
            return sum(place == verifier for place in self._places.values())


# Ray Serve makes the object that places streams, so that it can share nothing but a module with those who open them.
OPEN_STREAMS = OpenStreams()
