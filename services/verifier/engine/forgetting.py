"""Tenants whose requests are to be forgotten: by the target before the next pass, by the drafter as soon as it hears."""

from __future__ import annotations

from collections import OrderedDict

from speculation.messages import ForgetTenant
from speculation.ports import DraftLink, Target

# A drafter that returns is told of so many tenants, the latest ones.
_MOST = 1024


class Forgetting:
    """Takes the word at any time, and passes it on when it can be acted upon."""

    def __init__(self, target: Target, link: DraftLink) -> None:
        self._target = target
        self._link = link
        self._waiting: set[str] = set()
        self._told: OrderedDict[str, None] = OrderedDict()

    def forget(self, tenant: str) -> None:
        """Note a tenant."""
        self._waiting.add(tenant)
        self._told[tenant] = None
        self._told.move_to_end(tenant)
        if len(self._told) > _MOST:
            self._told.popitem(last=False)
        self._link.forget(ForgetTenant(tenant=tenant))

    def between_passes(self) -> None:
        """Let the target forget."""
        while self._waiting:
            self._target.forget(self._waiting.pop())

    def connected(self) -> None:
        """A drafter that was away may remember what it should not. Told twice, it only drafts worse for a while."""
        for tenant in self._told:
            self._link.forget(ForgetTenant(tenant=tenant))
