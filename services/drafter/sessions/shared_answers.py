"""Answers that all drafters of a service share: each tells the store of its own, and takes the others'.

Nothing here is waited for by a draft: what has not come yet is missing from it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from services.drafter.sessions.request import DraftedRequest
from speculation.errors import OutriderError
from speculation.ports import AnswerStore

log = logging.getLogger(__name__)

# The store is asked at most so often about one tenant, in seconds, and with so many calls at once.
_EVERY_S = 1.0
_MOST_CALLS = 64
_LAST_CALLS_S = 2.0
# Most tenants that are known, beside those with calls under way; of one whose turn is longest ago, everything is asked for
# anew.
_MOST_TENANTS = 64

Answers = Sequence[Sequence[int]]


@dataclass(kw_only=True, slots=True, eq=False)
class _Tenant:
    """What is known of a tenant's answers in the store.

    Attributes:
        generation: None until the store has answered.
        last: up to where they have been read.
        asked_s: when the store was asked last, in the loop's seconds.
        calls: calls to the store that are under way.
    """

    generation: int | None = None
    last: str = ""
    asked_s: float = float("-inf")
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class SharedAnswers:
    """One drafter's side of the store.

    Args:
        take: hands a tenant's answers of others to the sources.
        drop: lets the sources forget a tenant, since others have.

    Attributes:
        outcomes: numbers of answers that were "kept" in the store, "recalled" from it, or "lost": not kept, as the store was
            not there or the tenant had been forgotten.
    """

    def __init__(
        self,
        store: AnswerStore,
        take: Callable[[str, Answers], Awaitable[None]],
        drop: Callable[[str], Awaitable[None]],
    ) -> None:
        self._store, self._take, self._drop = store, take, drop
        self._name = secrets.token_hex(8)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._calls = 0
        self.outcomes: Counter[str] = Counter({"kept": 0, "recalled": 0, "lost": 0})

    def begin(self, session: DraftedRequest) -> None:
        """A session has been opened: keep its answer, and ask for the others'."""
        if session.tenant is None:
            return
        known = self._tenants.setdefault(session.tenant, _Tenant())
        self._tenants.move_to_end(session.tenant)
        session.generation = known.generation
        now = asyncio.get_running_loop().time()
        if now >= known.asked_s + _EVERY_S and self._calls < _MOST_CALLS:
            known.asked_s = now
            self._call(known, self._recall(session, session.tenant, known))
        # One with calls under way stays: who forgets the tenant must find them. And the one that has just begun does.
        idle = [tenant for tenant, each in self._tenants.items() if not each.calls and tenant != session.tenant]
        for tenant in idle[: max(0, len(self._tenants) - _MOST_TENANTS)]:
            del self._tenants[tenant]

    def end(self, session: DraftedRequest) -> None:
        """A session's request has ended."""
        if session.tenant is None or not session.answer:
            return
        known = self._tenants.get(session.tenant)
        if session.generation is None or known is None or self._calls >= _MOST_CALLS:
            self.outcomes["lost"] += 1
            return
        self._call(known, self._keep(session.tenant, session.generation, session.answer))

    def forget(self, tenant: str) -> Awaitable[None]:
        """Delete a tenant's answers in the store. From this call on, nothing that is under way reaches the sources any more.

        The awaited part raises ``OutriderError`` where the store cannot be reached.
        """
        known = self._tenants.pop(tenant, None)
        for call in known.calls if known is not None else ():
            call.cancel()
        return self._store.forget(tenant)

    async def stop(self) -> None:
        """Let calls that are under way end, for a moment."""
        calls = [call for known in self._tenants.values() for call in known.calls]
        if calls:
            await asyncio.wait(calls, timeout=_LAST_CALLS_S)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _call(self, known: _Tenant, speaking: Coroutine[None, None, None]) -> None:
        call = asyncio.create_task(speaking, name="shared-answers")
        known.calls.add(call)
        self._calls += 1
        call.add_done_callback(lambda done: self._called(known, done))

    def _called(self, known: _Tenant, call: asyncio.Task[None]) -> None:
        known.calls.discard(call)
        self._calls -= 1

    async def _recall(self, session: DraftedRequest, tenant: str, known: _Tenant) -> None:
        try:
            more = True
            while more:
                found = await self._store.recall(tenant, known.last, self._name)
                if found.generation != known.generation:
                    if known.generation is not None:
                        # The tenant was forgotten elsewhere: what was read before goes, too.
                        await self._drop(tenant)
                        known.last = ""
                        found = await self._store.recall(tenant, "", self._name)
                    known.generation = found.generation
                if session.generation is None:
                    session.generation = known.generation
                known.last, more = found.last, found.more
                if found.answers:
                    await self._take(tenant, found.answers)
                    self.outcomes["recalled"] += len(found.answers)
        except OutriderError as error:
            log.debug("no answers of others: %s", error)
        except Exception:
            log.exception("recalling answers failed")

    async def _keep(self, tenant: str, generation: int, answer: Sequence[int]) -> None:
        kept = False
        try:
            kept = await self._store.keep(tenant, generation, self._name, answer)
        except OutriderError as error:
            log.debug("an answer is not kept: %s", error)
        except Exception:
            log.exception("keeping an answer failed")
        self.outcomes["kept" if kept else "lost"] += 1
