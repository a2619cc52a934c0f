"""What ``ServeVerifierLink`` needs of Ray Serve: handles that choose a replica, carry a stream, and ask all replicas.

The choice is the product's own (``cluster.verifiers.choice``). Errors are Ray's own classes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayTaskError

from cluster.ray.open_streams import OpenStreams
from cluster.verifiers.choice import choices, place_of
from tests.simulation.fault_points import FaultPoints
from tests.simulation.network import Connection, Inbox, Network
from tests.simulation.virtual_loop import Process, current_process

_END = object()
_LOOK_S, _LATE_S = 0.25, 1.5


class Replica(Protocol):
    """A process that Serve knows.

    Attributes:
        listed: routers are told of it.
        methods: what can be called: the deployment.
    """

    name: str
    process: Process
    listed: bool
    methods: Any


class Handle:
    """Stands for ``DeploymentHandle`` in one router."""

    app_name = "simulated"

    def __init__(
        self,
        deployment: str,
        replicas: Callable[[], Sequence[Replica]],
        network: Network,
        faults: FaultPoints,
        streams: OpenStreams,
    ) -> None:
        self.deployment_name = deployment
        self._replicas, self._network, self._faults, self._streams = replicas, network, faults, streams
        self.describe = SimpleNamespace(remote=lambda: self._ask("describe"))

    def options(self, *, stream: bool, session_id: str) -> SimpleNamespace:
        """A handle for one stream."""
        name, _, session = session_id.partition("/")

        def generate(request: bytes, caller: str) -> Stream:
            return Stream(self, name, session, request, caller)

        return SimpleNamespace(generate=SimpleNamespace(remote=generate))

    def broadcast(self, method: str, *arguments: object) -> Broadcast:
        """Call a method of all replicas that can be reached."""
        return Broadcast([self._call(each, method, *arguments) for each in self.listed])

    @property
    def listed(self) -> list[Replica]:
        """The replicas that this router knows of."""
        return [each for each in self._replicas() if each.listed]

    def choose(self, stream: str, session: str) -> Replica | None:
        """As ``StickyRouter``; None: there is none."""
        place = place_of(session)
        ring = sorted(self.listed, key=lambda each: hashlib.sha256(f"{place}{each.name}".encode()).digest())
        if not ring:
            return None
        chosen = choices(ring, session, lambda each: self._streams.at(each.name))[0]
        self._streams.placed(stream, chosen.name)
        return chosen

    def connect(self, replica: Replica) -> Connection:
        """A connection to a replica."""
        return self._network.connect(current_process(), replica.process)

    def fires(self, point: str) -> bool:
        """As ``FaultPoints.fires``."""
        return self._faults.fires(point)

    async def _ask(self, method: str) -> object:
        """Ask any replica; Serve waits until there is one."""
        while not (listed := self.listed):
            await asyncio.sleep(_LOOK_S)
        return await self._call(listed[int(self._network.random.random() * len(listed))], method)

    async def _call(self, replica: Replica, method: str, *arguments: object) -> object:
        me, answers = current_process(), Inbox()
        connection = self.connect(replica)
        connection.when_ended(me, lambda: answers.put(RayActorError()))

        async def answer() -> None:
            try:
                said = await getattr(replica.methods, method)(*arguments)
            except Exception as error:
                said = _wrapped(error)
            connection.send(replica.process, answers.put, said)

        if not self.fires("serve: a question is lost"):
            connection.send(me, lambda: asyncio.create_task(answer()))
        if replica.process.dead:
            connection.end()
        try:
            return await answers.get()
        finally:
            connection.end()


class Broadcast:
    """Stands for Serve's response to a broadcast."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = [asyncio.ensure_future(call) for call in calls]

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        """All answers.

        Raises:
            TimeoutError: not all have come in time.
        """
        async with asyncio.timeout(timeout_s):
            return list(await asyncio.gather(*self._calls, return_exceptions=True))


class Stream:
    """Stands for the response of a streaming call."""

    def __init__(self, handle: Handle, stream: str, session: str, request: bytes, caller: str) -> None:
        self._handle, self._stream, self._session, self._asked = handle, stream, session, (request, caller)
        self._events = Inbox()
        self._connection: Connection | None = None

    async def __aiter__(self) -> AsyncIterator[object]:
        while (replica := self._handle.choose(self._stream, self._session)) is None:
            await asyncio.sleep(_LOOK_S)
        self._begin(replica)
        while (event := await self._events.get()) is not _END:
            yield event
        self.cancel()

    def _begin(self, replica: Replica) -> None:
        me, handle = current_process(), self._handle
        connection = self._connection = handle.connect(replica)
        connection.when_ended(me, lambda: self._events.put(RayActorError()))
        if handle.fires("answers: the request is lost"):
            connection.end()
            return
        connection.send(me, lambda: self._serve(replica, connection))
        if replica.process.dead:
            connection.end()

    def _serve(self, replica: Replica, connection: Connection) -> None:
        """In the replica's process."""
        task = asyncio.create_task(self._answer(replica, connection))
        connection.when_ended(replica.process, task.cancel)

    async def _answer(self, replica: Replica, connection: Connection) -> None:
        fires = self._handle.fires
        events = replica.methods.generate(*self._asked)
        try:
            async for event in events:
                if fires("answers: the stream breaks"):
                    connection.end()
                    return
                late_s = _LATE_S if fires("answers: an event is late") else 0.0
                connection.send(replica.process, self._events.put, event, late_s=late_s)
            connection.send(replica.process, self._events.put, _END)
        except Exception as error:
            connection.send(replica.process, self._events.put, _wrapped(error))
        finally:
            await events.aclose()

    def cancel(self) -> None:
        """Give the stream up."""
        if self._connection is not None:
            self._connection.end()


def _wrapped(error: Exception) -> RayTaskError:
    """An error of a replica as a router sees it."""
    wrapped = RayTaskError.__new__(RayTaskError)
    wrapped.cause = error
    return wrapped
