"""A router's link to several verifiers, which chooses among them as the one on Ray does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.ray.verifier_choice import choices, place_of, session_of
from speculation.errors import OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, ServiceState, VerifierCard
from speculation.ports import VerifierPort
from speculation.types import Plan


class ChosenVerifier:
    """Implements ``speculation.ports.VerifierLink``.

    A request goes to the verifier that its beginning belongs to, each further attempt to the next one.
    """

    def __init__(self, verifiers: Sequence[VerifierPort]) -> None:
        self._verifiers = verifiers
        self._open: Counter[int] = Counter()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        attempt = int(request.request_id.rpartition(".")[2])
        order = self._order(session_of(request.tenant, request.prompt, attempt))
        began = False
        try:
            async with aclosing(self._asked(order[0], request)) as events:
                async for event in events:
                    began = True
                    yield event
        except ResourceExhausted:
            if began:
                raise
            # One of the others may have room.
            async with aclosing(self._asked(order[1 % len(order)], request)) as events:
                async for event in events:
                    yield event

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
        return await self._verifiers[0].compare(request, plans)

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
        return ServiceState(verifiers=tuple(card for card in answers if isinstance(card, VerifierCard)))

    async def forget(self, tenant: str) -> None:
        await asyncio.gather(*(each.forget(tenant) for each in self._verifiers))
