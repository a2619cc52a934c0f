"""Responses that are kept for a while, each tenant's for itself.

What is kept is bounded in bytes, number and age. Where there is no room, the tenant that has the most loses its oldest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from services.api.config import StoredResponses
from services.api.messages import RouterPort
from services.api.passing_router import PassingRouter

# Bytes of an entry beside what it holds.
_OVERHEAD = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResponse:
    """A response.

    Attributes:
        response: as its client got it, as JSON.
        context: the items that it answered, as a JSON list.
    """

    response: bytes
    context: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.response) + len(self.context) + _OVERHEAD


class ResponseStore(Protocol):
    """Where responses are kept. No tenant reaches another's.

    Raises:
        Unavailable: from all methods but ``close``, where it cannot be reached.
    """

    async def put(self, tenant: str, name: str, stored: StoredResponse) -> bool:
        """Keep a response under its id; False: there is no room for one so large."""

    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        """The response of an id; None: it is not there, or no longer."""

    async def delete(self, tenant: str, name: str) -> bool:
        """Delete a response; whether it was there."""

    async def forget(self, tenant: str) -> None:
        """Delete all responses of a tenant."""

    async def close(self) -> None:
        """Let go of what it holds."""


@dataclass(slots=True)
class _Shelf:
    """One tenant's responses, the oldest first."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class ResponsesInMemory:
    """Implements ``ResponseStore`` in this process. What is too old is gone for everybody, and deleted at the next call.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, bounds: StoredResponses, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        # When each one ends, in that order: all are kept for the same time.
        self._ends: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._size = 0

    async def put(self, tenant: str, name: str, stored: StoredResponse) -> bool:
        self._expire()
        self._drop(tenant, name)
        if stored.size > self._bounds.bytes:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.entries[name] = stored
        self._ends[tenant, name] = self._clock() + self._bounds.age_s
        shelf.size += stored.size
        self._size += stored.size
        while self._share(self._size, len(self._ends)) > 1:
            largest = max(self._shelves, key=lambda each: self._share(self._shelves[each].size, self._count(each)))
            self._drop(largest, next(iter(self._shelves[largest].entries)))
        return True

    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        self._expire()
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.entries.get(name)

    async def delete(self, tenant: str, name: str) -> bool:
        self._expire()
        return self._drop(tenant, name)

    async def forget(self, tenant: str) -> None:
        shelf = self._shelves.get(tenant)
        for name in [] if shelf is None else list(shelf.entries):
            self._drop(tenant, name)

    async def close(self) -> None:
        self._shelves.clear()
        # With them: what ends of one that is not there would be looked at for ever.
        self._ends.clear()
        self._size = 0

    def _count(self, tenant: str) -> int:
        return len(self._shelves[tenant].entries)

    def _share(self, size: int, count: int) -> float:
        """Of all the room there is."""
        return max(size / self._bounds.bytes, count / self._bounds.most)

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and next(iter(self._ends.values())) <= now:
            self._drop(*next(iter(self._ends)))

    def _drop(self, tenant: str, name: str) -> bool:
        shelf = self._shelves.get(tenant)
        if shelf is None or (stored := shelf.entries.pop(name, None)) is None:
            return False
        del self._ends[tenant, name]
        shelf.size -= stored.size
        self._size -= stored.size
        if not shelf.entries:
            del self._shelves[tenant]
        return True


class ForgettingRouter(PassingRouter):
    """Implements ``RouterPort`` by another router: when a tenant is to be forgotten, so are its stored responses."""

    def __init__(self, router: RouterPort, store: ResponseStore) -> None:
        super().__init__(router)
        self._store = store

    @override
    async def forget(self, tenant: str) -> None:
        try:
            await self._store.forget(tenant)
        finally:
            await super().forget(tenant)
