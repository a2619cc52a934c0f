"""Users of several tenants who ask one thing after the other, at any door, and do not always wait for the answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.doors import DOORS, Doors
from benchmarks.soak.exchanges import Judged, SoakExchange, judge
from benchmarks.soak.requests import SoakRequest
from services.access.key_records import hash_key, new_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A tenant of the service.

    Attributes:
        users: of every ten, how many are its.
        pause_s: longest pause of a user between two requests.
        weight: see ``services.access.key_records.KeyRecord``.
    """

    name: str
    users: int
    pause_s: float
    weight: float = 1.0
    key: str = field(default_factory=new_key, repr=False)


def tenants() -> tuple[Tenant, ...]:
    """The soak's: one that always asks, one whose share is larger, and one that asks now and then."""
    return (
        Tenant(name="greedy", users=5, pause_s=0.0),
        Tenant(name="steady", users=3, pause_s=0.2, weight=2.0),
        Tenant(name="rare", users=2, pause_s=2.0),
    )


def write_keys(known: Sequence[Tenant], file: Path) -> None:
    """Write the keys file of these tenants."""
    lines = [f"- {{hash: {hash_key(each.key)}, tenant: {each.name}, weight: {each.weight}}}\n" for each in known]
    file.write_text("".join(lines))


# Share of the users of a stream who leave before its end.
_LEAVE = 0.2


class Users:
    """All users of a soak.

    Args:
        strategies: what they name, by turns of chance.
        told: hears how each exchange is judged.
    """

    def __init__(
        self,
        doors: Doors,
        requests: Sequence[SoakRequest],
        expected: Mapping[str, Sequence[int]],
        strategies: Sequence[str],
        told: Callable[[Judged], None],
    ) -> None:
        self._doors, self._requests, self._expected = doors, requests, expected
        self._strategies, self._told = strategies, told

    async def live(self, tenant: Tenant, source: random.Random, until_s: float) -> None:
        """One user, until the time of ``time.monotonic``."""
        while time.monotonic() < until_s:
            door = source.choice(DOORS)
            exchange = SoakExchange(
                request=source.choice(self._requests),
                tenant=tenant.name,
                door=door,
                strategy=source.choice(self._strategies),
                streamed=door.endswith("stream"),
            )
            leaves = source.random() < _LEAVE and exchange.streamed
            await self._doors.ask(exchange, tenant.key, source.randrange(6) if leaves else None)
            judged = judge(exchange, self._expected)
            self._told(judged)
            # Who is refused waits a moment; who is answered may ask again at once.
            await asyncio.sleep(source.random() * tenant.pause_s + (0.2 if judged.outcome == "error" else 0.0))


def shared_out(known: Sequence[Tenant], count: int) -> list[Tenant]:
    """The tenants of so many users, each with at least one where there are enough."""
    most = max(tenant.users for tenant in known)
    turns = [tenant for turn in range(most) for tenant in known if turn < tenant.users]
    return [turns[number % len(turns)] for number in range(count)]
