"""Connections between processes: delays, partitions, ends that die. Messages of one connection keep their order, as TCP's do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

from tests.simulation.virtual_loop import Process, VirtualLoop

_Arguments = TypeVarTuple("_Arguments")

# A connection that is cut for longer counts as broken at both ends, and so does one whose other end has died.
BROKEN_AFTER_S = 4.0
_RESET_S = 0.01


class Network:
    """Who can reach whom, and how long that takes.

    Args:
        delay_s: mean of a message's delay.
    """

    def __init__(self, loop: VirtualLoop, seed: int, delay_s: float) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self._delay_s = delay_s
        self._cut: set[frozenset[str]] = set()
        # In the order of their making: a set's order differs from run to run.
        self._open: dict[Connection, None] = {}

    def connect(self, caller: Process, callee: Process) -> Connection:
        """A new connection."""
        connection = Connection(self, caller, callee)
        self._open[connection] = None
        return connection

    def delay(self) -> float:
        """Of the next message."""
        return self._delay_s * 2 * self.random.random()

    def is_cut(self, one: Process, other: Process) -> bool:
        """Whether nothing gets through between two processes."""
        return bool(self._cut) and frozenset((one.name, other.name)) in self._cut

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two processes, by name: the next one of that name is concerned, too."""
        pair = frozenset((one, other))
        self._cut.add(pair)
        for connection in list(self._open):
            if connection.between == pair:
                self.loop.call_later(BROKEN_AFTER_S, connection.check, context=self.loop.outside.context.copy())

    def heal(self, one: str, other: str) -> None:
        """Let everything through again, what was sent meanwhile included."""
        pair = frozenset((one, other))
        self._cut.discard(pair)
        for connection in list(self._open):
            if connection.between == pair:
                connection.go_on()

    def killed(self, process: Process) -> None:
        """Note that a process has died: its peers' connections are reset."""
        for connection in list(self._open):
            if process in connection.ends:
                self.loop.call_later(_RESET_S, connection.end, context=self.loop.outside.context.copy())

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._open.pop(connection, None)

    @property
    def open(self) -> int:
        """Connections that exist."""
        return len(self._open)


class Connection:
    """A connection between two processes.

    Attributes:
        ends: who has opened it, and who has accepted it.
        ended: it is closed, or broken.
    """

    def __init__(self, network: Network, caller: Process, callee: Process) -> None:
        self.ends = (caller, callee)
        self.between = frozenset((caller.name, callee.name))
        self.ended = False
        self._network = network
        self._last_at = [0.0, 0.0]
        self._held: list[tuple[int, Callable[[], object]]] = []
        self._told: list[tuple[Process, Callable[[], object]]] = []

    def when_ended(self, process: Process, tell: Callable[[], object]) -> None:
        """Call ``tell`` in a process when the connection breaks."""
        self._told.append((process, tell))

    def send(
        self,
        sender: Process,
        deliver: Callable[[Unpack[_Arguments]], object],
        *what: *_Arguments,
        late_s: float = 0.0,
    ) -> None:
        """Have the other end call ``deliver``, after what was sent before."""
        if self.ended:
            return
        to = 1 if sender is self.ends[0] else 0
        loop = self._network.loop
        at = self._last_at[to] = max(self._last_at[to], loop.time() + self._network.delay() + late_s)
        loop.call_at(at, self._deliver, to, deliver, *what, context=self.ends[to].context.copy())

    def send_past(self, sender: Process, deliver: Callable[[Unpack[_Arguments]], object], *what: *_Arguments) -> None:
        """As ``send``, without regard to the order, for what may be overtaken."""
        to = 1 if sender is self.ends[0] else 0
        loop = self._network.loop
        at = loop.time() + self._network.delay()
        loop.call_at(at, self._deliver, to, deliver, *what, context=self.ends[to].context.copy())

    def _deliver(self, to: int, deliver: Callable[[Unpack[_Arguments]], object], *what: *_Arguments) -> None:
        if self.ended:
            return
        if self._network.is_cut(*self.ends) or any(end == to for end, _ in self._held):
            # Not when it is sent: what is under way then must not come behind it. Nor before what is still held at an end
            # that was stopped when the connection healed.
            self._held.append((to, lambda: deliver(*what)))
        else:
            deliver(*what)

    def go_on(self) -> None:
        """Deliver what was held, before anything that is still under way."""
        for to in {end: None for end, _ in self._held}:
            self._network.loop.call_soon(self._deliver_held, to, context=self.ends[to].context.copy())

    def _deliver_held(self, to: int) -> None:
        if self.ended or self._network.is_cut(*self.ends):
            return
        held, self._held = self._held, [each for each in self._held if each[0] != to]
        for end, deliver in held:
            if end == to:
                deliver()

    def check(self) -> None:
        """Break, if the cut still lasts."""
        if self._network.is_cut(*self.ends):
            self.end()

    def end(self) -> None:
        """Break, or close: both ends are told."""
        if self.ended:
            return
        self.ended = True
        self._network.forget(self)
        for process, tell in self._told:
            self._network.loop.call_soon(tell, context=process.context.copy())
        self._told.clear()


class Inbox:
    """What has come over a connection and was not read yet, for one reader."""

    def __init__(self) -> None:
        self._came: list[object] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: object) -> None:
        """Add a message, or an exception for the reader."""
        self._came.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> object:
        """The next message.

        Raises:
            BaseException: the exception whose turn it is.
        """
        while not self._came:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        message = self._came.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message
