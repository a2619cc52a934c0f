"""Tenants whose requests are to be forgotten: by the target before the next pass, by every drafter, and each says so."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from services.verifier.target_port import Target
from speculation import limits
from speculation.errors import Unavailable
from speculation.messages import ForgetTenant
from speculation.ports import DraftLink

# A drafter that returns is told of so many tenants, the latest ones.
_MOST = 1024
# Well before whoever asks gives up, so that it hears who has not answered.
_WITHIN_S = limits.FORGET_S / 2

_Answer = asyncio.Future[None]


class Forgetting:
    """Takes the word at any time, passes it on when it can be acted upon, and waits until all have acted.

    Args:
        links: ways to drafters, by what messages call them.
    """

    def __init__(self, target: Target, links: Mapping[str, DraftLink]) -> None:
        self._target = target
        self._links = links
        self._numbers = itertools.count(1)
        # Whom it is told, for each tenant: the target, when the next pass is planned ...
        self._waiting: dict[str, list[_Answer]] = {}
        # ... and the drafters, at once, each under a number.
        self._told: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._answers: dict[int, list[_Answer]] = {}

    def tell(self, tenant: str) -> dict[str, _Answer]:
        """Pass the word on; gives for everybody who must forget what is done when they have."""
        loop = asyncio.get_running_loop()
        answers: dict[str, _Answer] = {"the target": loop.create_future()}
        self._waiting.setdefault(tenant, []).append(answers["the target"])
        earlier = self._told.pop(tenant, {})
        numbers = self._told[tenant] = {name: next(self._numbers) for name in self._links}
        for name, number in numbers.items():
            answers[name] = loop.create_future()
            # Whoever waits for an earlier word's answer is content with this one's.
            patient = [answer for answer in self._answers.pop(earlier.get(name, 0), []) if not answer.done()]
            self._answers[number] = [*patient, answers[name]]
        if len(self._told) > _MOST:
            for number in self._told.popitem(last=False)[1].values():
                self._answers.pop(number, None)
        for name in self._links:
            self._tell(name, tenant)
        return answers

    async def forget(self, tenant: str) -> None:
        """Pass the word on and wait.

        Raises:
            Unavailable: somebody has not answered in time; says who. A drafter that is away is told on its return.
        """
        answers = self.tell(tenant)
        await asyncio.wait(answers.values(), timeout=_WITHIN_S)
        missed = [name for name, answer in answers.items() if not answer.done()]
        for name in missed:
            answers[name].cancel()
        if missed:
            raise Unavailable(f"{' and '.join(missed)} did not answer within {_WITHIN_S:g} s; try again")

    def between_passes(self) -> None:
        """Let the target forget."""
        while self._waiting:
            tenant, answers = self._waiting.popitem()
            self._target.forget(tenant)
            _done(answers)

    def answered(self, forget_id: int) -> None:
        """A drafter has forgotten."""
        _done(self._answers.pop(forget_id, ()))

    def connected(self, name: str) -> None:
        """A drafter that was away may remember what it should not. Told twice, it only drafts worse for a while."""
        for tenant in self._told:
            self._tell(name, tenant)

    def _tell(self, name: str, tenant: str) -> None:
        self._links[name].forget(ForgetTenant(tenant=tenant, forget_id=self._told[tenant][name]))


def _done(answers: Iterable[_Answer]) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(None)
