"""Hidden states of committed tokens: kept for origins that connect late, and split to the size of messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from speculation.types import Features


class KeptFeatures:
    """Hidden states of all live requests, up to a total size; the oldest are dropped first.

    Args:
        max_bytes: the limit; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._count = 0
        self._kept: OrderedDict[int, tuple[str, Features]] = OrderedDict()
        self._of: dict[str, dict[int, None]] = {}

    def add(self, request_id: str, features: Features) -> None:
        """Keep hidden states of a request."""
        self._count += 1
        self._kept[self._count] = (request_id, features)
        self._of.setdefault(request_id, {})[self._count] = None
        self._bytes += len(features.data)
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def of(self, request_id: str) -> list[Features]:
        """A request's hidden states that are still kept, ordered by position."""
        return sorted((self._kept[number][1] for number in self._of.get(request_id, ())), key=lambda each: each.start)

    def drop(self, request_id: str) -> None:
        """Drop a request's hidden states. Unknown ids are ignored."""
        for number in list(self._of.get(request_id, ())):
            self._remove(number)

    def _remove(self, number: int) -> None:
        request_id, features = self._kept.pop(number)
        self._bytes -= len(features.data)
        del self._of[request_id][number]
        if not self._of[request_id]:
            del self._of[request_id]


def pieces(features: Iterable[Features], most_bytes: int) -> Iterator[Features]:
    """Regroup rows into few pieces of at most ``most_bytes`` each; a piece has at least one row, whatever its size.

    Args:
        features: ordered by position; neighbours are joined.
    """
    joined: list[Features] = []
    for each in features:
        if joined and _adjoin(joined[-1], each) and sum(len(part.data) for part in joined) + len(each.data) <= most_bytes:
            joined.append(each)
            continue
        yield from _cut(joined, most_bytes)
        joined = [each]
    yield from _cut(joined, most_bytes)


def rows_from(features: Features, start: int) -> Features | None:
    """The rows at positions from ``start`` on; None if there are none."""
    skip = max(0, start - features.start)
    if skip >= features.rows:
        return None
    return features.part(skip, features.rows) if skip else features


def _adjoin(first: Features, second: Features) -> bool:
    same = (first.width, first.dtype, first.layers) == (second.width, second.dtype, second.layers)
    return same and first.start + first.rows == second.start


def _cut(joined: list[Features], most_bytes: int) -> Iterator[Features]:
    if not joined:
        return
    whole = joined[0].followed_by(joined[1:])
    each_time = max(1, most_bytes * whole.rows // max(1, len(whole.data)))
    for begin in range(0, whole.rows, each_time):
        yield whole.part(begin, min(whole.rows, begin + each_time))
