"""What is held at a moment: of requests that have ended, nothing may be; of a tenant that is forgotten, nothing either."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from services.drafter.service import DrafterService

if TYPE_CHECKING:
    from tests.simulation.world import World


def unsettled(world: World) -> list[str]:
    """What is held, by whom; empty: all counts are zero, and everybody is up."""
    held = [f"{each.name} is not up" for each in world.components if not each.up]
    for verifier in (each for each in world.verifiers if each.up):
        engine, blocks = verifier.engine, verifier.target.blocks
        for name, count in (
            ("running requests", engine.running),
            ("waiting requests", engine.waiting),
            ("blocks", blocks.total - blocks.available),
            ("requests of the target", len(verifier.target._sampling)),
            ("lost slots of states", verifier.target.lost_slots),
            ("callers", len(verifier.methods._callers._tasks)),
        ):
            if count:
                held.append(f"{verifier.name}: {count} {name}")
        if engine.hold.on:
            held.append(f"{verifier.name} stands still")
        if verifier.reloading.open:
            held.append(f"{verifier.name} waits for the next step of a reload")
        if not engine.healthy:
            held.append(f"{verifier.name} is not healthy")
        if used := len(blocks._free) + len(blocks._idle) - len({*blocks._free, *blocks._idle}):
            held.append(f"{verifier.name}: {used} blocks are free twice")
    served = {each.target.weights for each in world.verifiers if each.up}
    if len(served) > 1 and not world.schedule.setup.two_weights:
        held.append(f"the verifiers serve different weights: {sorted(served)}")
    held += [f"{each.name}: {each.sessions} sessions" for each in world.drafters if each.up and each.sessions]
    for router in (each for each in world.routers if each.up):
        for tenant, use in router.gate._uses.items():
            if use._running or use._arriving:
                held.append(f"{router.name}: {use._running} slots of {tenant}")
        if router.link.streams or router.streams._places:
            held.append(f"{router.name}: {router.link.streams} streams")
        joining, ordered = router.service._pauses._joining, router.service._reloads._task
        for what, task in (("has verifiers join a pause", joining), ("replaces weights", ordered)):
            if task is not None and not task.done():
                held.append(f"{router.name} still {what}")
        pool = router.service._pool
        if pool._free != pool._threads._max_workers:
            held.append(f"{router.name}: {pool._free} of {pool._threads._max_workers} tokenising threads are free")
    return held


def kept_of(world: World, tenant: str) -> list[str]:
    """What is kept of a tenant: sealed blocks, answers, sessions under its name."""
    root = hashlib.sha256(b"tenant " + tenant.encode()).digest()
    kept = [
        f"{each.name} keeps its blocks"
        for each in world.verifiers
        if each.up and root in each.target.blocks._root_of.values()
    ]
    for machine in (each for each in world.drafters if each.up):
        drafter = machine.drafter
        if not isinstance(drafter, DrafterService):
            continue
        suffix = drafter._text._sources.get("suffix")
        if suffix is not None and tenant in suffix._answers:  # type: ignore[attr-defined]
            kept.append(f"{machine.name} keeps its answers")
        if any(session.tenant == tenant for session in drafter._sessions.values()):
            kept.append(f"{machine.name} keeps its sessions")
    return kept
