"""Deletes a tenant's data at the target (before the next pass) and at every drafter, and waits for their confirmations."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from services.verifier.model.target_port import Target
from speculation.errors import Unavailable
from speculation.messages import ForgetTenant
from speculation.ports import DraftLink

# Most recent tenants of which a reconnecting drafter is told.
_MOST = 1024

_Answer = asyncio.Future[None]


class Forgetting:
    """Passes requests to forget a tenant on to the target and the drafters.

    Args:
        links: links to the drafters, by their names in messages.
        within_s: longest wait for their confirmations.
    """

    def __init__(self, target: Target, links: Mapping[str, DraftLink], within_s: float) -> None:
        self._within_s = within_s
        self._target = target
        self._links = links
        self._numbers = itertools.count(1)
        # By tenant: futures of the target, which is told before the next pass.
        self._waiting: dict[str, list[_Answer]] = {}
        # By tenant: the number of the latest message to each drafter. These are sent at once.
        self._told: OrderedDict[str, dict[str, int]] = OrderedDict()
        # Who waits for a drafter's word on one of its messages: by the drafter's name too, or one could answer for another.
        self._answers: dict[tuple[str, int], list[_Answer]] = {}

    def tell(self, tenant: str) -> dict[str, _Answer]:
        """Ask the target and all drafters to forget. Returns by name a future that is done when that one has."""
        loop = asyncio.get_running_loop()
        answers: dict[str, _Answer] = {"the target": loop.create_future()}
        self._waiting.setdefault(tenant, []).append(answers["the target"])
        earlier = self._told.pop(tenant, {})
        numbers = self._told[tenant] = {name: next(self._numbers) for name in self._links}
        for name, number in numbers.items():
            answers[name] = loop.create_future()
            # This number's answer also settles callers who wait for an earlier one.
            patient = [answer for answer in self._answers.pop((name, earlier.get(name, 0)), []) if not answer.done()]
            self._answers[name, number] = [*patient, answers[name]]
        if len(self._told) > _MOST:
            for told in self._told.popitem(last=False)[1].items():
                self._answers.pop(told, None)
        for name in self._links:
            self._tell(name, tenant)
        return answers

    async def forget(self, tenant: str) -> None:
        """Ask the target and all drafters to forget, and wait until they have.

        Raises:
            Unavailable: some have not answered in time; names them. A disconnected drafter is told when it reconnects.
        """
        answers = self.tell(tenant)
        await asyncio.wait(answers.values(), timeout=self._within_s)
        missed = [name for name, answer in answers.items() if not answer.done()]
        for name in missed:
            answers[name].cancel()
        if missed:
            raise Unavailable(f"{' and '.join(missed)} did not answer within {self._within_s:g} s; try again")

    def between_passes(self) -> None:
        """Let the target forget the tenants asked for since the last call. Must be called between passes."""
        while self._waiting:
            tenant, answers = self._waiting.popitem()
            self._target.forget(tenant)
            _done(answers)

    def answered(self, name: str, forget_id: int) -> None:
        """Note the confirmation of the drafter ``name``. What it was not asked itself it cannot confirm."""
        _done(self._answers.pop((name, forget_id), ()))

    def connected(self, name: str) -> None:
        """Repeat to a reconnected drafter what it may have missed. Forgetting twice only makes drafts worse for a while."""
        for tenant in self._told:
            self._tell(name, tenant)

    def _tell(self, name: str, tenant: str) -> None:
        self._links[name].forget(ForgetTenant(tenant=tenant, forget_id=self._told[tenant][name]))


def _done(answers: Iterable[_Answer]) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(None)
