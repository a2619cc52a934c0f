"""Users: each sends a request, reads its answer, leaves early or tries again. What they saw is kept for the judge."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.api.messages import ClientRequest, Completion, RequestedSampling, TextChunk
from speculation.errors import OutriderError, ResourceExhausted, Unavailable
from tests.simulation.assets import GRAMMARS
from tests.simulation.components import RouterMachine
from tests.simulation.network import Connection, Inbox
from tests.simulation.schedule import Ask

if TYPE_CHECKING:
    from tests.simulation.world import World

_MOST_ATTEMPTS = 3


class RouterLost(Exception):
    """The router has died, or cannot be reached: what a user's client says of a broken connection."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One attempt of a user, as the user saw it.

    Attributes:
        came_at: when each piece of the answer came, the first entry being the call itself.
        begun_at, left_at: when its router admitted it and was done with it; None: it did not, or died.
        life: which life of the router's that was.
        outcomes: how it ended: "ok", "left", or the class of an error; exactly one.
        reached: the router has got it.
    """

    name: str
    ask: Ask
    router: str
    tokens: list[int] = field(default_factory=list)
    came_at: list[float] = field(default_factory=list)
    begun_at: float | None = None
    left_at: float | None = None
    life: int = 0
    ended_at: float | None = None
    outcomes: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    reached: bool = False
    completion: Completion | None = None


def key_of(tenant: str) -> str:
    """A tenant's key."""
    return f"key of {tenant}"


def request_of(ask: Ask, name: str) -> ClientRequest:
    """The request that a user sends."""
    return ClientRequest(
        input=ask.prompt,
        sampling=RequestedSampling(
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos and ask.grammar is None,
            structured_outputs=None if ask.grammar is None else GRAMMARS[ask.grammar],
        ),
        strategy=ask.strategy,
        request_id=name,
        priority=ask.priority,
    )


async def user(world: World, number: int, ask: Ask) -> None:
    """Ask, and try again where that makes sense."""
    await asyncio.sleep(ask.at_s)
    for attempt in range(_MOST_ATTEMPTS):
        router = world.routers[(ask.router + attempt) % len(world.routers)]
        call = Call(name=f"{number}x{attempt}", ask=ask, router=router.name)
        world.calls.append(call)
        await _ask(world, router, call)
        if not call.errors or not isinstance(call.errors[-1], Unavailable | ResourceExhausted | RouterLost):
            return
        await asyncio.sleep(0.5)


async def _ask(world: World, router: RouterMachine, call: Call) -> None:
    loop, inbox = world.loop, Inbox()
    call.came_at.append(loop.time())
    connection = world.network.connect(loop.outside, router.process)
    connection.when_ended(loop.outside, lambda: inbox.put(RouterLost()))
    connection.send(loop.outside, _arrived, router, call, connection, inbox)
    if router.process.dead:
        connection.end()
    try:
        while True:
            event = await inbox.get()
            if isinstance(event, TextChunk):
                call.tokens += event.token_ids
                call.came_at.append(loop.time())
            elif isinstance(event, Completion):
                call.completion = event
                call.outcomes.append("ok")
                return
            if call.ask.leaves_after is not None and len(call.tokens) >= call.ask.leaves_after:
                call.outcomes.append("left")
                return
    except (OutriderError, RouterLost) as error:
        call.errors.append(error)
        call.outcomes.append(type(error).__name__)
    except Exception as error:
        call.errors.append(error)
        call.outcomes.append(f"no error of ours: {error!r}")
    finally:
        call.ended_at = loop.time()
        connection.end()


# --- in the router's process --------------------------------------------------------------------------------------


def _arrived(router: RouterMachine, call: Call, connection: Connection, inbox: Inbox) -> None:
    call.reached = True
    task = asyncio.create_task(_serve(router, call, connection, inbox))
    connection.when_ended(connection.ends[1], task.cancel)


async def _serve(router: RouterMachine, call: Call, connection: Connection, inbox: Inbox) -> None:
    """As the public servers do it: the gate, then the router."""
    me = connection.ends[1]
    call.life = router.lives
    try:
        caller = router.gate.caller(key_of(call.ask.tenant), "a user")
        async with router.gate.admit(caller, request_of(call.ask, call.name)) as visit:
            call.begun_at = router.loop.time()
            async with aclosing(router.service.generate(visit.request)) as events:
                async for event in events:
                    visit.note(event)
                    connection.send(me, inbox.put, event)
    except Exception as error:
        connection.send(me, inbox.put, error)
    finally:
        call.left_at = router.loop.time()
