"""Judges the gates: limits of keys, and a line of the audit log for every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tests.simulation.schedule import LIMITED
from tests.simulation.users import Call

if TYPE_CHECKING:
    from tests.simulation.components import RouterMachine
    from tests.simulation.world import World

_MINUTE_S = 60.0
# Ends of which the router does not know the user's side.
_UNTOLD = ("left", "given up", "RouterLost")


def of_access(world: World) -> Iterator[str]:
    """What is wrong with limits and audit."""
    setup = world.schedule.setup
    for router in world.routers:
        calls = [call for call in world.calls if call.router == router.name and call.reached]
        yield from _audited(world, router, calls)
        for life in range(1, router.lives + 1):
            mine = [call for call in calls if call.life == life and call.ask.tenant == LIMITED and call.begun_at is not None]
            yield from _at_once(mine, world.keys.at_once)
            for name, most, amounts in (
                ("requests", setup.requests_per_minute, [1] * len(mine)),
                ("tokens", setup.tokens_per_minute, [_used(call) for call in mine]),
            ):
                if most is not None:
                    yield from _per_minute(mine, amounts, most, name)


def _refused(world: World, call: Call) -> bool:
    return call.ask.tenant in world.revoked or call.key != world.keys.of(call.ask.tenant)


def _audited(world: World, router: RouterMachine, calls: Sequence[Call]) -> Iterator[str]:
    lines: dict[object, list[object]] = {}
    for line in router.audit.lines:
        lines.setdefault(line.get("request_id"), []).append(line["outcome"])
    for call in calls:
        found = lines.get(call.name, [])
        if len(call.outcomes) != 1:
            # The judge says so.
            continue
        (end,) = call.outcomes
        if end == "Unauthenticated":
            continue
        if call.left_at is None or (end in _UNTOLD and _refused(world, call)):
            # The router died with it; or its key was valid no more, which nobody was told.
            fits = len(found) <= 1
        elif end in _UNTOLD:
            fits = len(found) == 1
        else:
            fits = found == [end]
        if not fits:
            yield f"{call.name}: ended with {end}, and the audit log of {router.name} says {found}"


def _at_once(calls: Sequence[Call], limits: Sequence[tuple[float, int | None]]) -> Iterator[str]:
    """Nobody is admitted beyond the limit of that moment: those that ran before it was lowered go on."""
    for call in calls:
        assert call.begun_at is not None
        most = next(most for since, most in reversed(limits) if since <= call.begun_at)
        if most is None:
            continue
        others = [each for each in calls if each.begun_at <= call.begun_at < (each.left_at or 1e9)]  # type: ignore
        if len(others) > most:
            yield f"{call.name}: {len(others)} requests of its key at once, of at most {most}"


def _per_minute(calls: Sequence[Call], amounts: Sequence[int], most: int, name: str) -> Iterator[str]:
    """No span of time may have more than a whole minute's worth and what came in since."""
    for first, begin in enumerate(calls):
        total = 0
        for amount, call in list(zip(amounts, calls, strict=True))[first:]:
            total += amount
            assert call.begun_at is not None and begin.begun_at is not None
            if total > most * (1 + (call.begun_at - begin.begun_at) / _MINUTE_S) + 1:
                yield f"{call.name}: {total} {name} in {call.begun_at - begin.begun_at:.1f} s, of {most} a minute"
                return


def _used(call: Call) -> int:
    return 0 if call.completion is None else len(call.ask.prompt) + call.completion.completion_tokens
