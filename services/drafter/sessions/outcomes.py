"""The likeliest outcomes of a step under way, for which drafts can be made ahead, and for how many that is worth it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from speculation.estimators import DecayingMean
from speculation.tree import ROOT, path_to
from speculation.types import TokenTree

# A rough estimate of the target's choice after a node: tokens and their probabilities, likeliest first.
Likely = Callable[[int], Sequence[tuple[int, float]]]

# Bonus tokens that are considered after each path.
_BONUSES = 2
# An outcome that comes true in fewer of its steps is drafted for in trials only.
_LEAST = 0.02
# All outcomes are tried once in so many steps.
_TRY_EVERY = 32
# Share of steps in which an outcome is assumed to come true at first; how many steps that counts as; least weight of a step.
_ASSUMED, _PRIOR, _NEWEST = 0.2, 8.0, 0.02


def likeliest_outcomes(tree: TokenTree, likely: Likely, most: int) -> list[tuple[int, ...]]:
    """The ``most`` likeliest sequences of committed tokens: a path of accepted nodes, then a bonus token.

    The acceptance walk ends at a node if the target's token is none of its children. So only tokens that are not drafted
    below a node are considered as bonus tokens after it.
    """
    probability = {ROOT: 1.0}
    drafted: dict[int, set[int]] = {ROOT: set()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if node in tree.probes:
            continue
        drafted[parent].add(token)
        drafted[node] = set()
        probability[node] = tree.scores[node] if tree.scores else probability[parent] / 2
    found: list[tuple[float, tuple[int, ...]]] = []
    for node, below in drafted.items():
        own = [(token, p) for token, p in likely(node) if token not in below][:_BONUSES]
        path = tuple(tree.tokens[step] for step in path_to(tree, node))
        found += [(probability[node] * p, (*path, token)) for token, p in own]
    return [outcome for _, outcome in heapq.nlargest(most, found)]


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
