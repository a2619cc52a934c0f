"""Which replica of a deployment a component connects to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from ray import serve
from ray.serve.handle import DeploymentHandle

from speculation.errors import Unavailable

log = logging.getLogger(__name__)

_ANSWER_S = 3.0
# An address that was tried so recently has failed if another one is asked for.
_FAILED_S = 10.0
_LOOK_AGAIN_S = 15.0


def by_turns(addresses: Mapping[int, str], own_rank: int) -> list[str]:
    """Addresses in the order in which the component of rank ``own_rank`` should try them.

    Callers of successive ranks begin at successive servers, so that all have equally many callers. A hash of their names
    would spread the load by chance alone, and with few servers leave some idle.

    Args:
        addresses: by their servers' ranks.
    """
    ranks = sorted(addresses)
    start = own_rank % len(ranks)
    return [addresses[rank] for rank in ranks[start:] + ranks[:start]]


class Peers:
    """The replicas of one deployment, as one of its callers sees them.

    Args:
        ask: gives the addresses of all replicas that answer, by rank.
        own_rank: gives the caller's rank.
        clock: seconds.

    Attributes:
        current: the address that was given last, or None.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Mapping[int, str]]],
        own_rank: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._own_rank = own_rank
        self._clock = clock
        self._known: Mapping[int, str] = {}
        self._tried: dict[str, float] = {}
        self.current: str | None = None

    async def address(self) -> str:
        """The "host:port" to connect to now: the best one, but for those that have failed just before.

        Raises:
            Unavailable: no replica answers.
        """
        try:
            self._known = await self._ask()
        except TimeoutError:
            # One that hangs delays the answers of all: go by what they said before.
            log.info("some replicas did not answer")
        if not self._known:
            raise Unavailable("no replica answers")
        order = by_turns(self._known, self._own_rank())
        now = self._clock()
        fresh = [each for each in order if not self._failed(each)]
        # All have been tried: the one whose turn is longest ago comes next.
        chosen = fresh[0] if fresh else min(order, key=self._tried.__getitem__)
        self._tried[chosen] = now
        self.current = chosen
        return chosen

    async def follow(self, reconnect: Callable[[], None]) -> None:
        """Call ``reconnect`` whenever another replica has become the best one, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                best = await self._best()
            except Exception as error:
                log.info("some replicas did not answer: %s", error)
                continue
            if best is not None and self.current not in (None, best) and not self._failed(best):
                log.info("moving from %s to %s", self.current, best)
                reconnect()

    async def _best(self) -> str | None:
        addresses = await self._ask()
        return by_turns(addresses, self._own_rank())[0] if addresses else None

    def _failed(self, address: str) -> bool:
        return self._clock() - self._tried.get(address, -_FAILED_S) < _FAILED_S


def peers_of(handle: DeploymentHandle) -> Peers:
    """The replicas of ``handle``'s deployment, for the replica that this process is."""

    async def ask() -> dict[int, str]:
        answers = await handle.broadcast("place").results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        return dict(answer for answer in answers if not isinstance(answer, BaseException))

    return Peers(ask, own_rank)


def own_rank() -> int:
    """This replica's number among those of its deployment, from 0 on."""
    return int(serve.get_replica_context().rank.rank)
