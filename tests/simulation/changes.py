"""An operator who pauses decoding for a while, or replaces the weights, at a router. What must hold meanwhile and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from speculation.errors import OutriderError
from speculation.reloads import PauseMode, RunningAnswers
from tests.simulation.components import RouterMachine
from tests.simulation.ends import causes_between
from tests.simulation.schedule import NEW_WEIGHTS, Event

if TYPE_CHECKING:
    from tests.simulation.world import World

# Answers under way get so long to end; what a router needs beside that; and how often an operator asks again.
_WITHIN_S, _MOST_S, _AGAIN_S = 20.0, 300.0, 1.0
# A question that is lost is waited for, for an hour where weights are read.
_LOST_S = 3900.0
# Routers have met paused verifiers by then.
_SEEN_S = 3.0
# When an operator who has resumed looks whether it is so.
_LOOKS_S = (15.0, 45.0)
# What a fault may still cause so many seconds after its end.
_AFTERMATH_S = 70.0


class RouterGone(Exception):
    """The router that was asked has died, or is not there."""


@dataclass(slots=True)
class Change:
    """A pause, or new weights, as the operator saw it.

    Attributes:
        done_at: when it was confirmed; None: it was not, so far.
        over_at: when everything went on, as far as the operator knows.
        error: what it ended with.
        lives: of all verifiers when it was asked for.
    """

    asked_at: float
    lives: Sequence[int]
    done_at: float | None = None
    over_at: float = float("inf")
    error: Exception | None = None


async def pause(world: World, event: Event) -> None:
    """Have decoding stand still, and let it go on."""
    change = _begun(world)
    world.pauses.append(change)
    mode = cast(PauseMode, event.to)
    error = await _ordered(world, event.on, lambda router: router.service.pause(mode, _WITHIN_S))
    if error is None:
        change.done_at = world.loop.time()
        passes = [each.target.passes for each in world.verifiers]
        await asyncio.sleep(event.lasts_s)
        for verifier, lives, before in zip(world.verifiers, change.lives, passes, strict=True):
            # One that was started since joins the pause soon.
            if verifier.lives == lives and verifier.target.passes != before:
                world.problems.append(f"{verifier.name} computes during a pause")
    change.error = error
    await _resume(world)
    change.over_at = world.loop.time()
    for later_s in _LOOKS_S:
        await asyncio.sleep(later_s)
        await resume_once_more(world)


async def resume_once_more(world: World) -> None:
    """Go on again, if no verifier is left of those that knew of a pause, and the router that has ended it did not know which one
    that was, or was not there afterwards: another one has the new verifiers join it, and nobody can tell it better."""
    not_there = any(event.kind in ("kill router", "freeze router", "cut verifier") for event in world.schedule.events)
    for change in world.pauses:
        brief = change.over_at - change.asked_at < _SEEN_S
        anew = all(each.lives != before for each, before in zip(world.verifiers, change.lives, strict=True))
        if anew and (brief or not_there):
            world.counts["resumed once more"] += 1
            await _resume(world)


async def _resume(world: World) -> None:
    """Go on, by whichever router answers."""
    begun_at = world.loop.time()
    for attempt in count():
        name = world.routers[attempt % len(world.routers)].name
        if await _ordered(world, name, lambda router: router.service.resume()) is None:
            return
        if world.loop.time() - begun_at > _MOST_S:
            world.problems.append(f"decoding is paused, and cannot be resumed for {_MOST_S:g} s")
            return
        await asyncio.sleep(_AGAIN_S)


async def reload(world: World, event: Event) -> None:
    """Replace the weights of all verifiers."""
    change = _begun(world)
    world.reloads.append(change)
    running = cast(RunningAnswers, event.to)
    error = await _ordered(world, event.on, lambda router: router.service.reload(str(NEW_WEIGHTS), running, _WITHIN_S))
    change.over_at = world.loop.time()
    if error is None:
        change.done_at = change.over_at
    change.error = error


def _begun(world: World) -> Change:
    return Change(world.loop.time(), [each.lives for each in world.verifiers])


def of_changes(world: World) -> Iterator[str]:
    """What is wrong with how they ended: an error needs a cause."""
    for what, changes in (("pause", world.pauses), ("reload", world.reloads)):
        for change in changes:
            error = change.error
            world.counts[f"{what}: {'ok' if error is None else type(error).__name__}"] += 1
            if error is None:
                continue
            if not isinstance(error, OutriderError | RouterGone):
                yield f"the {what} ended in {error!r}"
            other = world.pauses and world.reloads
            slow = any(at >= change.asked_at for at, _ in world.points.when)
            if not (other or slow or causes_between(world, change.asked_at - _AFTERMATH_S, change.over_at)):
                yield f"the {what} ended in {error!r}, and nothing had happened"


async def _ordered(
    world: World, name: str, order: Callable[[RouterMachine], Coroutine[Any, Any, object]]
) -> Exception | None:
    """Ask a router for something. Returns what it raises; nothing if it is done."""
    router = world.named(name)
    assert isinstance(router, RouterMachine)
    if not router.up:
        return RouterGone()
    lives, begun_at = router.lives, world.loop.time()
    task = world.loop.start(router.process, order(router))
    while not task.done():
        await asyncio.wait((task,), timeout=_AGAIN_S)
        if not router.up or router.lives != lives:
            return RouterGone()
        most_s = _LOST_S if world.points.fired["serve: a question is lost"] else _MOST_S
        if world.loop.time() - begun_at > most_s and not router.process.frozen:
            world.problems.append(f"{name} has not answered an operator for {most_s:g} s")
            return RouterGone()
    return cast(Exception | None, task.exception())
