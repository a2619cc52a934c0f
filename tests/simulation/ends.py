"""Judges how an answer ended: an error needs a cause, and one that had begun a much better one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.simulation.schedule import LIMITED
from tests.simulation.users import Call

if TYPE_CHECKING:
    from tests.simulation.world import World

# Points of which a stream dies. What else is late or lost at the drafters' links may cost speed, and nothing else.
FATAL = ("answers: the stream breaks", "answers: the request is lost", "serve: a question is lost")
# What a fault may still cause so many seconds after its end: a silence is noticed, a queue is worked off.
_AFTERMATH_S = 30.0


def of_end(world: World, call: Call) -> Iterator[str]:
    """What is wrong with an answer's end."""
    (end,) = call.outcomes
    if end in ("ok", "left", "given up"):
        return
    begun, said = (
        bool(call.tokens),
        f"{call.name} ({call.ask.tenant}): {end} after {len(call.tokens)} tokens: {call.errors[-1]}",
    )
    match end:
        case "RouterLost":
            if not _happened(world, "kill router"):
                yield f"{said}: no router died"
        case "Unauthenticated":
            if call.ask.tenant not in world.revoked and call.key == world.keys.of(call.ask.tenant):
                yield f"{said}: the key is valid"
        case "Internal":
            if not _happened(world, "fail pass"):
                yield f"{said}: no pass failed"
        case "ResourceExhausted":
            if begun:
                yield f"{said}: it had begun"
            elif not _may_be_full(world, call):
                yield f"{said}: there was room"
        case "Unavailable" | "NotBegun" | "NodeTaken":
            yield from _unavailable(world, call, said)
        case _:
            yield f"{said}: nobody expects this"


def _unavailable(world: World, call: Call, said: str) -> Iterator[str]:
    ended_at = call.ended_at or 0.0
    causes = causes_between(world, call.came_at[0] - _AFTERMATH_S, ended_at)
    if not causes:
        yield f"{said}: nothing had happened"
    elif call.tokens:
        since = causes_between(world, call.came_at[-1] - _AFTERMATH_S, ended_at)
        if ended_at - call.came_at[-1] < world.schedule.setup.timeout_s and len(since) < 2:
            yield f"{said}: an answer that had begun was given up after {ended_at - call.came_at[-1]:.1f} s for one fault"


def causes_between(world: World, begin: float, end: float) -> list[tuple[float, float]]:
    """The faults that touch a span of time, each with its own."""
    spans = [span for span in world.faults if span[1] >= begin and span[0] <= end]
    return spans + [(at, at) for at, point in world.points.when if point in FATAL and begin <= at <= end]


def _happened(world: World, kind: str) -> bool:
    return world.counts[kind] > 0


def _may_be_full(world: World, call: Call) -> bool:
    """Whether a limit may refuse a call: one of its key's, or of the queue, which is fair to who asks for one answer alone."""
    setup = world.schedule.setup
    limits = (world.keys.replaced[LIMITED], setup.max_concurrent, setup.requests_per_minute, setup.tokens_per_minute)
    if call.ask.tenant == LIMITED and any(limits):
        return True
    if setup.max_wait_s is not None:
        return True
    tenants = len({each.ask.tenant for each in world.calls})
    return setup.max_waiting < tenants or _beside(world, call) > 0


def _beside(world: World, call: Call) -> int:
    """How many other calls of its tenant were under way during a call."""
    return sum(
        each is not call and each.ask.tenant == call.ask.tenant
        and each.came_at[0] <= (call.ended_at or 0.0) and (each.left_at or each.ended_at or 1e9) >= call.came_at[0]
        for each in world.calls
    )  # fmt: skip
