"""Two ways to stop decoding for a while.

``Pause``: what is under way ends, new requests wait, and then the target may be changed. ``Hold``: no pass is begun, and all
requests stay where they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from services.verifier.engine.admission import Admission
from services.verifier.engine.clock import now
from services.verifier.engine.live_request import LiveRequest
from services.verifier.grammar.grammar_state import GrammarState
from speculation.errors import NotBegun, Unavailable
from speculation.messages import GenerationRequest

# Seconds in which routers have asked once more for lost answers (``RouterWaits.migration_s``); by which timers may be early.
_COME_BACK_S, _EARLY_S = 4.0, 0.01

Make = Callable[[GenerationRequest, GrammarState | None], LiveRequest]


class Pause:
    """Pauses a decoding loop, which calls ``look`` in each step.

    Args:
        wake: lets the loop take its next step.
        release: frees what a request holds.
        make: a request in the loop, from its message.
    """

    def __init__(
        self, requests: Admission, wake: Callable[[], None], release: Callable[[LiveRequest], None], make: Make
    ) -> None:
        self._requests = requests
        self._wake = wake
        self._release = release
        self._make = make
        self._restarting = False
        self._reached: asyncio.Future[None] | None = None
        self._back_until = 0.0

    @property
    def under_way(self) -> list[LiveRequest]:
        """The requests that have been computed by the present weights."""
        waiting = (request for request in self._requests.waiting if request.under_way)
        return [*self._requests.running.values(), *waiting]

    async def begin(self, *, restart: bool, within_s: float) -> None:
        """Let new requests wait, and return once no answer is under way.

        Args:
            restart: answers of which nobody has seen anything do not end, but begin once more after the pause.

        Raises:
            Unavailable: some are still under way after ``within_s`` seconds; there is no pause any more.
        """
        self._requests.waiting.turns, self._restarting = "under way", restart
        self._reached, self._back_until = asyncio.get_running_loop().create_future(), 0.0
        self._wake()
        try:
            async with asyncio.timeout(within_s):
                await self._reached
        except BaseException as error:
            left = len(self.under_way)
            self.end()
            if not isinstance(error, TimeoutError):
                raise
            # Answers that nobody waits for any more end at once, but for the pass that they are in.
            none_left = "lost answers could come back" if now() < self._back_until else "a pass was running"
            what, many = ("answers were under way", f" ({left} of them)") if left else (none_left, "")
            raise Unavailable(
                f"{what} still after {within_s:g} s{many}, so that nothing has changed: try again, with more time"
            ) from None

    def end(self) -> None:
        """Let requests be admitted again."""
        self._requests.waiting.turns, self._restarting, self._reached = "all", False, None
        self._wake()

    def give_up(self, why: str = "decoding was resumed") -> None:
        """Have ``begin`` raise ``Unavailable`` if it still waits."""
        if self._reached is not None and not self._reached.done():
            self._reached.set_exception(Unavailable(f"{why} before all answers had ended"))

    def lost(self) -> None:
        """Note that answers were lost with the target, which is there again: those that come back end before the pause."""
        if self._reached is not None and not self._reached.done():
            self._back_until = now() + _COME_BACK_S
            asyncio.get_running_loop().call_later(_COME_BACK_S + _EARLY_S, self._wake)

    def look(self, passes: int) -> None:
        """Note whether anything is under way, with so many passes."""
        if self._reached is None or self._reached.done():
            return
        # Over stages some pass is always under way as long as anybody decodes: those that are in none do not wait for that.
        for request in self.under_way if self._restarting else ():
            if (request.message.whole or request.generated == 0) and not request.in_pass:
                self._begin_again(request)
        if not passes and not self.under_way and now() >= self._back_until:
            # Not even an answer that comes from another verifier from now on.
            self._requests.waiting.turns = "none"
            self._reached.set_result(None)

    def refuse_moved(self) -> None:
        """Refuse answers that have come during the pause, begun by the weights before, unless nobody has seen anything."""
        for request in self.under_way:
            # For who has gone nothing is begun once more: nobody would end it.
            if request.message.whole and not request.closed:
                self._begin_again(request)
                continue
            request.fail(NotBegun("the answer was begun by other weights than those that serve now"))
            self._release(request)

    def _begin_again(self, request: LiveRequest) -> None:
        """Let a request wait as if it had just come, but for being refused."""
        self._release(request)
        message = replace(request.message, committed=(), arithmetic="")
        successor = self._make(message, None if request.grammar is None else request.grammar.from_beginning())
        successor.again, successor.void = True, request.void or request.generated > 0
        request.successor, successor.events = successor, request.events
        if request.tenant != request.message.tenant:
            successor.forget_tenant()
        self._requests.join(successor)


class Hold:
    """Stops a decoding loop between two passes. To it, the time until it may go on is time without requests.

    Args:
        wake: lets the loop, which calls ``look`` in each step, take its next one.

    Attributes:
        on: whether no pass may be begun.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.on = False
        self._wake = wake
        self._still: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Return once no pass is under way, and what the last ones gave is on its way to the clients.

        Raises:
            Unavailable: ``end`` was called first.
        """
        self.on, self._still = True, asyncio.get_running_loop().create_future()
        self._wake()
        try:
            await self._still
        except BaseException:
            # Also where nobody waits for it any more.
            self.end()
            raise

    def end(self, why: str = "decoding was resumed") -> None:
        """Let the loop go on."""
        self.on = False
        if self._still is not None and not self._still.done():
            self._still.set_exception(Unavailable(f"{why} before it stood still"))
        self._wake()

    def look(self, passes: int) -> None:
        """Note whether the loop stands still, with so many passes under way."""
        if self.on and not passes and self._still is not None and not self._still.done():
            self._still.set_result(None)
