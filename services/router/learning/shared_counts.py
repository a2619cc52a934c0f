"""Costs that routers share: each learns by itself, and adds what is new to Redis every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from services.metrics.registry import DROPPED, Metrics
from services.router.learning.contexts import Context
from services.router.learning.counts import MOST_TENANTS, Costs, Counts, Sheet, add_sheet
from speculation.errors import OutriderError

if TYPE_CHECKING:
    from services.router.learning.counts_in_redis import CountsInRedis

log = logging.getLogger(__name__)

# Seconds from one exchange to the next, and after which a tenant that has not asked is given up: it may have been forgotten.
EVERY_S, GIVEN_UP_S = 5.0, 600.0


class SharedCounts:
    """Exchanges costs. While Redis is away, the router learns on alone, and adds the rest when it is back.

    Args:
        lock: held by whoever reads or changes ``counts``.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        counts: Counts,
        store: CountsInRedis,
        lock: Lock,
        metrics: Metrics = DROPPED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts, self._store, self._lock, self._clock = counts, store, lock, clock
        self._exchanges = metrics.counter("router_learning_exchanges_total")
        metrics.follow("router_learning_damaged_total", lambda: {(): store.damaged})
        # What Redis does not have yet: everybody's under None.
        self._new = Counts()
        # When each tenant asked last; and those that Redis had at the last exchange.
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._known: set[str | None] = set()
        # Those of which there is something to tell or to hear.
        self._touched: set[str] = set()
        self._next_s = 0.0
        self._away = False
        self._under_way: asyncio.Task[None] | None = None

    def asked(self, context: Context) -> None:
        """A tenant has asked; the lock is held."""
        self._touched.add(context.tenant)
        self._asked[context.tenant] = self._clock()
        self._asked.move_to_end(context.tenant)
        if len(self._asked) > MOST_TENANTS:
            self._give_up(next(iter(self._asked)))

    def learn(self, context: Context, costs: Costs) -> None:
        """An answer was added to the counts; the lock is held."""
        self._touched.add(context.tenant)
        self._new.learn(context, costs)

    def begin(self) -> None:
        """Begin an exchange if it is time for one."""
        under_way = self._under_way is not None and not self._under_way.done()
        if not under_way and self._clock() >= self._next_s:
            self._under_way = asyncio.get_running_loop().create_task(self.exchange())

    async def exchange(self) -> None:
        """Add what is new, and take over what others have added. Where Redis does not answer, nothing is lost."""
        now = self._clock()
        self._next_s = now + EVERY_S
        with self._lock:
            for tenant in [tenant for tenant, at in self._asked.items() if at < now - GIVEN_UP_S]:
                self._give_up(tenant)
            self._touched &= self._asked.keys()
            tenants: list[str | None] = [None, *self._touched]
        try:
            for whose in tenants:
                await self._exchange(whose)
        except OutriderError as error:
            if not self._away:
                log.warning("what other routers learn is not known for now, and this one goes on alone: %s", error)
            self._away = True
            self._exchanges.add(1, "failed")
            return
        if self._away:
            log.info("what routers learn is shared again")
        self._away = False
        self._exchanges.add(1, "ok")

    async def forget(self, tenant: str) -> None:
        """Delete a tenant's costs everywhere. Other routers notice at their next exchange.

        Raises:
            Unavailable: Redis does not answer.
        """
        with self._lock:
            self._give_up(tenant)
        await self._store.forget(tenant)

    async def close(self) -> None:
        """End what is under way, and the connections."""
        if (task := self._under_way) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._store.close()

    async def _exchange(self, tenant: str | None) -> None:
        with self._lock:
            if tenant is not None:
                self._touched.discard(tenant)
            more = self._taken(tenant)
            own = add_sheet({}, self._counts.of(tenant))
        try:
            found = await self._store.add(tenant, more, own, known=tenant in self._known)
        except OutriderError:
            with self._lock:
                self._put_back(tenant, more)
            raise
        if tenant is not None and tenant not in self._asked:
            # Forgotten meanwhile, here; it may have been written afterwards.
            await self._store.forget(tenant)
            return
        with self._lock:
            self._known.discard(tenant) if found is None else self._known.add(tenant)
            # What was learnt during the exchange is new, too.
            self._counts.put(tenant, None if found is None else add_sheet(found, self._new.of(tenant)))

    def _taken(self, tenant: str | None) -> Sheet:
        """What Redis does not have yet of a tenant, which is handed over."""
        more = add_sheet({}, self._new.of(tenant))
        self._new.put(tenant, None)
        return more

    def _put_back(self, tenant: str | None, more: Sheet) -> None:
        if tenant is None or tenant in self._asked:
            if tenant is not None:
                self._touched.add(tenant)
            self._new.put(tenant, add_sheet(more, self._new.of(tenant)))

    def _give_up(self, tenant: str) -> None:
        self._asked.pop(tenant, None)
        self._known.discard(tenant)
        self._touched.discard(tenant)
        self._new.forget(tenant)
        self._counts.forget(tenant)
