"""Learns for how many of the likeliest outcomes of a step drafts made ahead are worth making."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.estimators import DecayingMean

# An outcome that comes true in fewer of its steps is drafted for in trials only.
_LEAST = 0.02
# All outcomes are tried once in so many steps.
_TRY_EVERY = 32
# Share of steps in which an outcome is assumed to come true at first; how many steps that counts as; least weight of a step.
_ASSUMED, _PRIOR, _NEWEST = 0.2, 8.0, 0.02


class OutcomeRanks:
    """How often the first, the second, ... of one group's outcomes comes true, over all requests.

    Args:
        most: most outcomes of a step.
    """

    def __init__(self, most: int) -> None:
        self._came = [DecayingMean(_ASSUMED, _NEWEST, _PRIOR) for _ in range(most)]
        self._steps = 0

    def wanted(self) -> int:
        """How many outcomes of the next step to draft for, at least one."""
        self._steps += 1
        if self._steps % _TRY_EVERY == 0:
            return len(self._came)
        return max((rank for rank, share in enumerate(self._came, 1) if share.value >= _LEAST), default=1)

    def learn(self, assumed: Sequence[Sequence[int]], committed: Sequence[int]) -> None:
        """Note which outcome came true of those that drafts were sent for, the likeliest first."""
        for share, outcome in zip(self._came, assumed, strict=False):
            share.add(float(tuple(committed[: len(outcome)]) == tuple(outcome)))
