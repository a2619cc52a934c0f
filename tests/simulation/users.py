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
from tests.simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.world import World

_MOST_ATTEMPTS = 3
# Seconds and passes after which whoever works for a user knows that it has given up, and the passes of a slow one.
_NOTICED_S, _PASSES, _OF_A_SLOW_ONE = 0.3, 2, 20


class RouterLost(Exception):
    """The router has died, or cannot be reached: what a user's client says of a broken connection."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One attempt of a user, as the user saw it.

    Attributes:
        came_at: when each piece of the answer came, the first entry being the call itself.
        begun_at, left_at: when its router admitted it and was done with it; None: it did not, or died.
        life: which life of the router's that was.
        outcomes: how it ended: "ok", "left", "given up", or the class of an error; exactly one.
        key: what it was sent with.
        reached: the router has got it.
    """

    name: str
    ask: Ask
    router: str
    key: str
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
        call = Call(name=f"{number}x{attempt}", ask=ask, router=router.name, key=world.keys.of(ask.tenant))
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
        async with asyncio.timeout(call.ask.patience_s):
            await _read(call, inbox, loop)
    except TimeoutError:
        call.outcomes.append("given up")
        loop.call_later(_NOTICED_S + _PASSES * world.schedule.setup.pass_s, _still_decoded, world, call)
    except (OutriderError, RouterLost) as error:
        call.errors.append(error)
        call.outcomes.append(type(error).__name__)
    except Exception as error:
        call.errors.append(error)
        call.outcomes.append(f"no error of ours: {error!r}")
    finally:
        call.ended_at = loop.time()
        connection.end()


async def _read(call: Call, inbox: Inbox, loop: VirtualLoop) -> None:
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


def _still_decoded(world: World, call: Call) -> None:
    """Nobody works for a user who has given up, once that could be noticed: unless something was wrong meanwhile."""
    assert call.ended_at is not None
    if world.disturbed(call.ended_at - _OF_A_SLOW_ONE * world.schedule.setup.pass_s, world.loop.time()):
        return
    for verifier in (each for each in world.verifiers if each.up):
        known = (*verifier.engine._requests.running, *(each.id for each in verifier.engine._requests.waiting))
        if any(name.startswith(f"{call.name}.") for name in known):
            world.problems.append(f"{call.name}: given up at second {call.ended_at:.1f}, and {verifier.name} still has it")


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
        caller = router.gate.caller(call.key, "a user")
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
