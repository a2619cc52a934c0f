"""What one pipeline stage holds of live requests: keys and values, and the states of layers that have some."""

from __future__ import annotations

from collections.abc import Sequence

from services.verifier.kv_cache.pool import KVPool, in_place
from services.verifier.recurrence.state_pool import StatePool


class RequestMemory:
    """The stage's KV cache and, where its layers have states, those of the same requests."""

    def __init__(self, pool: KVPool, states: StatePool | None) -> None:
        self.pool = pool
        self.states = states

    def assign(self, owner: str, blocks: Sequence[int], fresh: int) -> None:
        """As ``KVPool.assign``; the first time, ``owner`` also gets a state."""
        self.pool.assign(owner, blocks, fresh)
        if self.states is not None:
            self.states.assign(owner)

    def keep(self, owner: str, context: int, rows: Sequence[int]) -> None:
        """As ``Target.keep``."""
        if not in_place(rows):
            self.pool.move(owner, [context + row for row in rows], context)
        if self.states is not None:
            self.states.keep(owner, context, rows)

    def load_state(self, owner: str, length: int, kept: int) -> None:
        """As ``StatePool.load``, where layers have states."""
        if self.states is not None:
            self.states.load(owner, length, kept)

    def save_state(self, owner: str, length: int, kept: int) -> None:
        """As ``StatePool.save``, where layers have states."""
        if self.states is not None:
            self.states.save(owner, length, kept)

    def forget(self, owner: str) -> None:
        """Drop what is held of ``owner``, which may hold nothing."""
        self.pool.forget(owner)
        if self.states is not None:
            self.states.forget(owner)

    def clear(self) -> None:
        """Drop everything."""
        self.pool.clear()
        if self.states is not None:
            self.states.clear()
