"""Ray Serve's ring of replicas without Ray Serve: the same hashes, the same order (a test compares the two)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import mmh3

# As ray.serve.experimental.consistent_hash_router.
_SEED = 0xF9B4CA77
_VIRTUAL = 100


class HashRing:
    """Replicas by their names, on a ring."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        points = sorted((_hash(f"{name}:{number}"), name) for name in self._names for number in range(_VIRTUAL))
        self._hashes = [point for point, _ in points]
        self._owners = [name for _, name in points]

    def order(self, place: str) -> list[str]:
        """All replicas, clockwise from a place."""
        owners, count = self._owners, len(self._owners)
        start = bisect_right(self._hashes, _hash(place))
        found: dict[str, None] = {}
        for offset in range(count):
            found[owners[(start + offset) % count]] = None
            if len(found) == len(self._names):
                break
        return list(found)


def _hash(text: str) -> int:
    return int(mmh3.hash64(text.encode(), seed=_SEED, signed=False)[0])
