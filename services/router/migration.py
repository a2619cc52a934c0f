"""Continues a request whose verifier is lost: at another one, or at the same one once it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from services.logs.names import log_name
from services.metrics.registry import Metrics
from speculation import limits
from speculation.errors import Internal, NodeTaken, NotBegun, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard
from speculation.ports import VerifierPort

log = logging.getLogger(__name__)

# Verifiers that may fail at one token of a request; refusals in a row from which on nobody is thought to go on with it.
_MOST_FAILED, _MOST_REFUSED = 2, 4


class Migration:
    """Sends requests to verifiers, and on to others.

    A request that no verifier has begun is refused after four attempts within some four seconds: its caller has lost
    nothing, and may find another router. One that a verifier had begun waits for one to come back, or to have room.

    Args:
        timeout_s: longest time between the loss of a verifier and the request's next token.
        delays_s: as ``RouterWaits.migration_s``.
        metrics: where it counts migrations.
    """

    def __init__(self, verifier: VerifierPort, timeout_s: float, delays_s: Sequence[float], metrics: Metrics) -> None:
        self._verifier = verifier
        self._timeout_s, self._delays_s = timeout_s, delays_s
        self._migrations = metrics.counter("migrations_total")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """A verifier's events. If it dies, another one continues after the committed tokens: same seed, same tokens.

        One with another arithmetic refuses to, and the next one is asked. Where all refuse, an answer that is sent as a
        whole begins once more: nobody has seen anything of it.

        A request at which two verifiers have failed, the second without a token, may be the cause, and is not tried on a
        third one. Verifiers whose machines were taken away do not count.
        """
        trouble = _Trouble(self._timeout_s, self._delays_s)
        committed: list[int] = []
        arithmetic = ""
        again = False
        attempt = 0
        while True:
            # A new id for each attempt: the verifier may be alive and still hold the abandoned attempt.
            name = f"{request.request_id}.{attempt}"
            events = self._verifier.generate(
                replace(request, request_id=name, committed=tuple(committed), arithmetic=arithmetic)
            )
            try:
                async for event in events:
                    if trouble.lost:
                        self._migrations.add(1, "continued")
                    if isinstance(event, Progress):
                        if again:
                            event, again = replace(event, restarted=True), False
                        if event.restarted:
                            committed.clear()
                        committed += event.token_ids
                        arithmetic = event.arithmetic or arithmetic
                    trouble.over()
                    yield event
                    if isinstance(event, Finished):
                        return
                raise Internal("the verifier ended without a result")
            except (Unavailable, ResourceExhausted) as error:
                if isinstance(error, ResourceExhausted) and not trouble.lost:
                    raise
                trouble.add(error, len(committed))
                name = log_name(request.request_id, request.traceparent)
                log.warning("request %s is interrupted after %d tokens: %s", name, len(committed), error)
            finally:
                await events.aclose()
            await self._pause(trouble)
            if request.whole and committed and trouble.refused >= _MOST_REFUSED:
                committed.clear()
                arithmetic, again = "", True
            attempt += 1

    async def _pause(self, trouble: _Trouble) -> None:
        """Wait until another attempt makes sense.

        Raises:
            Unavailable: it does not any more.
        """
        while True:
            delay_s = trouble.delay_s()
            if delay_s is None:
                if trouble.lost:
                    self._migrations.add(1, "given_up")
                raise trouble.error
            await asyncio.sleep(delay_s)
            if not trouble.lost:
                return
            # A verifier that is known to be gone must not count as a second one that failed at the request.
            try:
                await describe(self._verifier)
                return
            except OutriderError as error:
                log.info("no verifier is back: %s", error)


class _Trouble:
    """What has gone wrong since a request's last token.

    Attributes:
        error: the last one.
        refused: how often in a row a verifier that was there would not go on.
    """

    def __init__(self, timeout_s: float, delays_s: Sequence[float]) -> None:
        self.error: OutriderError = Unavailable("")
        self._timeout_s, self._delays_s = timeout_s, delays_s
        self._lost_at: float | None = None
        self._delays = self._failed = self._committed = self.refused = 0

    @property
    def lost(self) -> bool:
        """Whether a verifier that may have begun the request was lost, and none has gone on since."""
        return self._lost_at is not None

    def add(self, error: Unavailable | ResourceExhausted, committed: int) -> None:
        """Note that an attempt failed, with so many tokens committed."""
        self.error = error
        self.refused = self.refused + 1 if isinstance(error, NotBegun) else 0
        if isinstance(error, Unavailable) and not isinstance(error, NotBegun):
            self._lost_at = _now() if self._lost_at is None else self._lost_at
            if isinstance(error, NodeTaken):
                return
            self._failed = self._failed + 1 if committed == self._committed else 1
            self._committed = committed

    def over(self) -> None:
        """Note that a verifier answers."""
        self._lost_at, self._delays, self.refused = None, 0, 0

    def delay_s(self) -> float | None:
        """Seconds to wait before the next attempt; None: there is to be none."""
        waited_s = 0.0 if self._lost_at is None else _now() - self._lost_at
        more = self._delays < len(self._delays_s) or (self.lost and waited_s < self._timeout_s)
        if self._failed >= _MOST_FAILED or not more:
            return None
        self._delays += 1
        return self._delays_s[min(self._delays, len(self._delays_s)) - 1]


async def describe(verifier: VerifierPort) -> VerifierCard:
    """A verifier's description.

    Raises:
        Unavailable: none answers in time.
    """
    try:
        async with asyncio.timeout(limits.DESCRIBE_S):
            return await verifier.describe()
    except TimeoutError:
        raise Unavailable(f"the verifier has not answered for {limits.DESCRIBE_S:g} s; try again") from None


def _now() -> float:
    return asyncio.get_running_loop().time()
