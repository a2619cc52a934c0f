"""States of a target whose layers have some, as numbers: what a request's tokens sum up to, stepped over and never read again.

The product decides which ones are kept (``BlockAllocator``, ``KeptStates``). Here they are kept, loaded and stepped in the
order of ``StatePool``: chains in their pass, accepted nodes at the beginning of the next one, copies before anything is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.verifier.kv_cache.blocks import BlockAllocator
from services.verifier.model.target_port import Rows
from tests.simulation.law import row_of


@dataclass(slots=True)
class _Held:
    """A request's state: the sum of its first ``length`` rows, the accepted tokens behind them, and a slot still to be loaded."""

    total: int = 0
    length: int = 0
    accepted: list[int] = field(default_factory=list)
    loaded: int | None = None


class SimulatedStates:
    """States of all requests, and ``slots`` kept ones."""

    def __init__(self, slots: int) -> None:
        self._kept = [0] * slots
        self._held: dict[str, _Held] = {}

    def open(self, owner: str, length: int, kept: int | None) -> None:
        """Begin after ``length`` tokens, from a kept state if there is one."""
        self._held[owner] = _Held(length=length, loaded=kept)

    def step(self, batch: Sequence[Rows], blocks: BlockAllocator, weights: int) -> None:
        """Step over the accepted tokens and the chains of a pass that begins, with the target's present weights."""
        saved = {rows.request_id: dict(blocks.save_states(rows.request_id, rows.context + rows.chain)) for rows in batch}
        for held in self._held.values():
            if held.loaded is not None:
                held.total, held.loaded = self._kept[held.loaded], None
        for rows in batch:
            held, slots = self._held[rows.request_id], saved[rows.request_id]
            assert held.length + len(held.accepted) == rows.context, "the state stands elsewhere"
            for token in (*held.accepted, *rows.tokens[: rows.chain]):
                held.total += row_of(token, held.length, weights)
                held.length += 1
                if held.length in slots:
                    self._kept[slots[held.length]] = held.total
            held.accepted = []

    def accept(self, owner: str, tokens: Sequence[int]) -> None:
        """Note the nodes that were accepted in the last pass."""
        self._held[owner].accepted = list(tokens)

    def total(self, owner: str) -> int:
        """The sum of what the state of ``owner`` has seen."""
        return self._held[owner].total

    def close(self, owner: str) -> None:
        """Drop a request, which may be unknown."""
        self._held.pop(owner, None)
