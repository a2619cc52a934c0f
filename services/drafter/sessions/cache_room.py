"""Keeps the key-value caches of a model's sessions within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol


class Cache(Protocol):
    """A session's cache."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...

    def clear(self) -> None:
        """Let go of them; the session computes its rows anew when it needs them."""
        ...


# Of all sessions of a model.
MOST_BYTES = 2 << 30


class CacheRoom:
    """Beyond ``most_bytes``, the cache unused longest is cleared; the one used last stays whatever its size.

    A session whose cache was cleared computes it anew when it is asked.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        # Caches that hold rows, the one used last at the end.
        self._used: OrderedDict[Cache, None] = OrderedDict()

    def used(self, caches: Iterable[Cache]) -> None:
        """Note that these were used, in this order, and make room."""
        for cache in caches:
            self._used[cache] = None
            self._used.move_to_end(cache)
        for cache in [each for each in self._used if not each.nbytes]:
            del self._used[cache]
        held = sum(cache.nbytes for cache in self._used)
        while held > self.most_bytes and len(self._used) > 1:
            oldest, _ = self._used.popitem(last=False)
            held -= oldest.nbytes
            oldest.clear()
