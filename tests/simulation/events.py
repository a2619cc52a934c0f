"""What happens to components: kills, stops, cuts, failing passes, forgotten tenants, revoked keys, a new index."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.access.key_records import hash_key
from speculation.errors import OutriderError
from tests.simulation import changes
from tests.simulation.assets import assets
from tests.simulation.calm import kept_of
from tests.simulation.components import Component, RouterMachine, VerifierMachine
from tests.simulation.schedule import Event

if TYPE_CHECKING:
    from tests.simulation.world import World

# Serve tells routers of a death so much later, at most.
_UNLISTED_S = 1.0


async def happen(world: World, event: Event) -> None:
    """Let an event happen at its time, until it is over."""
    await asyncio.sleep(event.at_s)
    world.disturbing += 1
    await _happen(world, event)
    world.disturbing -= 1


async def _happen(world: World, event: Event) -> None:
    component, loop, begun_at = world.named(event.on), world.loop, world.loop.time()
    world.counts[event.kind] += 1
    match event.kind.split():
        case ["kill", _]:
            await restart(world, component, event.lasts_s)
        case ["freeze", _]:
            loop.freeze(component.process, True)
            await asyncio.sleep(event.lasts_s)
            loop.freeze(component.process, False)
        case ["cut", _]:
            world.network.cut(event.on, event.to)
            await asyncio.sleep(event.lasts_s)
            world.network.heal(event.on, event.to)
        case ["redis", "down"]:
            world.redis.down = True
            await asyncio.sleep(event.lasts_s)
            world.redis.down = False
        case ["new", "index"]:
            world.redis.publish(assets().indexes[0])
        case ["pause"]:
            await changes.pause(world, event)
            return
        case ["reload"]:
            await changes.reload(world, event)
            return
        case ["forget"]:
            await _forget(world, event)
            return
        case ["revoke", _]:
            for router in world.routers:
                router.keys.revoke(hash_key(world.keys.of(event.to)))
            world.revoked[event.to] = loop.time()
            return
        case ["replace", _]:
            _replace_key(world, event.to)
            return
        case _:
            _disturb(world, component, event)
    lasts_s = event.lasts_s
    world.faults.append((begun_at, max(loop.time(), begun_at + lasts_s)))


def _replace_key(world: World, tenant: str) -> None:
    """A tenant gets another key in place of its own, at all routers."""
    before = hash_key(world.keys.of(tenant))
    world.keys.replace(tenant, world.loop.time())
    for router in world.routers:
        router.replace_key(before, world.keys.record(tenant))


async def restart(world: World, component: Component, after_s: float) -> None:
    """Kill a component, and start it again later."""
    if not component.up:
        return
    world.loop.kill(component.process)
    world.network.killed(component.process)
    begun_at = world.loop.time()
    if world.points.fires("serve: a dead verifier is still listed"):
        await asyncio.sleep(min(after_s, _UNLISTED_S))
    component.listed = False
    await asyncio.sleep(max(0.0, begun_at + after_s - world.loop.time()))
    await component.start()
    world.faults.append((begun_at, world.loop.time()))


def _disturb(world: World, component: Component, event: Event) -> None:
    assert isinstance(component, VerifierMachine)
    if not component.up:
        return
    match event.kind:
        case "fail pass":
            component.target.fail_next = True
        case "lose target":
            component.target.lose_next = True
        case "hang pass":
            component.worker.hang_s = event.lasts_s


async def _forget(world: World, event: Event) -> None:
    """A user has a tenant forgotten; what is confirmed must be so."""
    router, tenant = world.named(event.on), event.to
    assert isinstance(router, RouterMachine)
    if not router.up:
        return
    begun_at = world.loop.time()

    async def forget() -> None:
        caller = router.gate.caller(world.keys.of(tenant), "a user")
        with router.gate.counted(caller, "Forget", "forget", scope="forget"):
            await router.service.forget(tenant)

    lives, known = router.lives, _requests_at_verifiers(world)
    task = world.loop.start(router.process, forget())
    await asyncio.wait((task,), timeout=60.0)
    if not task.done():
        # The router has died meanwhile, or is stopped.
        world.counts["forget without an end"] += 1
        if router.up and not router.process.frozen and lives == router.lives:
            world.problems.append(f"forgetting {tenant} had no end after 60 s")
        return
    error = task.exception()
    world.counts["forgotten" if error is None else f"forget: {type(error).__name__}"] += 1
    if error is not None and not isinstance(error, OutriderError):
        world.problems.append(f"forgetting {tenant} ended in {error!r}")
    if error is None and not _came_since(world, tenant, begun_at, known):
        world.problems += [f"{tenant} is forgotten, and {what}" for what in kept_of(world, tenant)]


def _requests_at_verifiers(world: World) -> set[str]:
    return {
        request.id
        for verifier in world.verifiers
        if verifier.up
        for request in (*verifier.engine._requests.running.values(), *verifier.engine._requests.waiting)
    }


def _came_since(world: World, tenant: str, since: float, known: set[str]) -> bool:
    """Whether a tenant's request has reached a verifier since then, that no verifier knew: it need not be forgotten."""
    names = {call.name for call in world.calls if call.ask.tenant == tenant}
    came = [name for verifier in world.verifiers for at, name in verifier.opened if at >= since]
    return any(name.partition(".")[0] in names and name not in known for name in came)
