"""A router's link to verifiers outside of Ray, which chooses among them as the one on Ray does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.verifiers.choice import attempt_of, choices, place_of, session_of
from cluster.verifiers.same_answer import same_adapter, same_weights
from speculation.adapters import AdapterOrder
from speculation.errors import NotBegun, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, ServiceState, VerifierCard
from speculation.ports import VerifierPort
from speculation.reloads import ReloadOrder
from speculation.types import Plan


class ChosenVerifier:
    """Implements ``speculation.ports.VerifierLink``.

    A request goes to the verifier that its beginning belongs to, each further attempt to the next one.

    Args:
        verifiers: at least one.
    """

    def __init__(self, verifiers: Sequence[VerifierPort]) -> None:
        self._verifiers = verifiers
        self._open: Counter[int] = Counter()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        order = self._order(session_of(request.tenant, request.prompt, attempt_of(request.request_id)))
        began = False
        try:
            async with aclosing(self._asked(order[0], request)) as events:
                async for event in events:
                    began = True
                    yield event
        except (NotBegun, ResourceExhausted) as error:
            # An answer that moves goes around by turns, and ends in the error of who would not go on with it.
            if began or (isinstance(error, NotBegun) and request.committed):
                raise
            # One of the others may be there, or have room.
            async with aclosing(self._asked(order[1 % len(order)], request)) as events:
                async for event in events:
                    yield event

    @property
    def streams(self) -> int:
        """Open calls of ``generate``."""
        return self._open.total()

    def _order(self, session: str) -> list[int]:
        first = int(place_of(session), 16) % len(self._verifiers)
        ring = [(first + step) % len(self._verifiers) for step in range(len(self._verifiers))]
        return choices(ring, session, self._open.__getitem__)

    async def _asked(self, index: int, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        self._open[index] += 1
        try:
            async with aclosing(self._verifiers[index].generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._open[index] -= 1

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        """Of the first one that answers."""
        *others, last = self._verifiers
        for verifier in others:
            try:
                return await verifier.compare(request, plans)
            except Unavailable:
                continue
        return await last.compare(request, plans)

    async def describe(self) -> VerifierCard:
        """Of the first one that answers.

        Raises:
            Unavailable: none does.
        """
        error: OutriderError = Unavailable("there is no verifier")
        asked = {asyncio.ensure_future(each.describe()) for each in self._verifiers}
        cards: list[VerifierCard] = []
        try:
            while asked:
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        cards.append(task.result())
                    except OutriderError as failed:
                        error = failed
                if cards:
                    return cards[0]
            raise error
        finally:
            for task in asked:
                task.cancel()

    async def service_state(self) -> ServiceState:
        answers = await asyncio.gather(*(each.describe() for each in self._verifiers), return_exceptions=True)
        cards = tuple(card for card in answers if isinstance(card, VerifierCard))
        states = {"running": len(cards), "not answering": len(answers) - len(cards)}
        return ServiceState(
            verifiers=cards, components={"verifier": {state: number for state, number in states.items() if number}}
        )

    async def forget(self, tenant: str) -> None:
        """At every one.

        Raises:
            Unavailable: not all have confirmed.
        """
        answers = await asyncio.gather(*(each.forget(tenant) for each in self._verifiers), return_exceptions=True)
        if failed := [each for each in answers if isinstance(each, BaseException)]:
            raise Unavailable(f"{len(failed)} of {len(answers)} verifiers have not confirmed ({failed[0]}); try again")

    async def adapt(self, order: AdapterOrder) -> str:
        """At every one."""
        answers = await asyncio.gather(*(each.adapt(order) for each in self._verifiers), return_exceptions=True)
        return same_adapter(order, answers)

    async def reload(self, order: ReloadOrder) -> str:
        """At every one."""
        return same_weights(await asyncio.gather(*(each.reload(order) for each in self._verifiers), return_exceptions=True))
