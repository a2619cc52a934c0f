"""Judges how long an answer paused: no longer than the faults lasted, what it takes to notice them, and the work to be done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.simulation.ends import causes_between
from tests.simulation.network import BROKEN_AFTER_S
from tests.simulation.users import Call

if TYPE_CHECKING:
    from tests.simulation.world import World

# Seconds until a fault is noticed and gone round: a cut connection breaks, a hung pass is given up, a router tries again.
_NOTICED_S = BROKEN_AFTER_S + 8.0
# Of a world without faults.
_AT_REST_S = 3.0
_LATE_S = 2.0
_SLOW_PASSES = 20


def of_pauses(world: World, call: Call) -> Iterator[str]:
    """What is wrong with an answer's pauses, the one before its first token included."""
    for begin, end in pairwise(call.came_at):
        allowed = allowed_pause(world, begin, end)
        if end - begin > allowed:
            yield f"{call.name}: a pause of {end - begin:.1f} s at second {begin:.1f}, with faults for {allowed:.1f} s"


def allowed_pause(world: World, begin: float, end: float) -> float:
    """The longest pause that is to be borne between two moments."""
    causes = causes_between(world, begin - _NOTICED_S, end)
    lost_s = sum(span[1] - span[0] + _NOTICED_S for span in causes)
    late_s = _LATE_S * sum(begin - _LATE_S <= at <= end for at, _ in world.points.when)
    paused_s = sum(_common_s((change.asked_at, change.over_at), (begin, end)) for change in (*world.pauses, *world.reloads))
    return _AT_REST_S + _work_s(world) + lost_s + late_s + paused_s


def _common_s(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _work_s(world: World) -> float:
    """Seconds of all passes that there can be: every call's, one after the other."""
    setup = world.schedule.setup
    # A pass over stages is begun and ended, which takes the same thread's time twice.
    calls = 1 if setup.stages == 1 else 2
    passes = calls * sum(
        len(call.ask.prompt) / setup.max_batched_tokens + 2 * call.ask.max_tokens + 2 for call in world.calls
    )
    slow = world.points.fired["target: a pass is slow"]
    return setup.pass_s * (passes + _SLOW_PASSES * slow)
