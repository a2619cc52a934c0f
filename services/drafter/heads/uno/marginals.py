"""Marginals of the tokens to come, and the tree of their likeliest paths.

A row of noise tells which tokens are likely at its position, and how likely each is. How much of what a row claims comes
true is learnt while answers are written. A path's probability is the product over its levels, since no row knows what
the others stand for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from speculation.estimators import Ratio
from speculation.tree import ROOT

# In tokens: how many a row's own claim weighs as much as, and how many are remembered.
_PRIOR = 8.0
_MEMORY = 512.0
# The most that a row's guesses may have in all.
_SURE = 0.98

# A token, and how likely it is.
Likely = tuple[int, float]


class ClaimRates:
    """How much of what rows of noise claim comes true. All requests share it; it holds no text."""

    def __init__(self) -> None:
        self._seen: dict[int, Ratio] = {}

    def of(self, row: int, claimed: Sequence[Likely]) -> list[Likely]:
        """What may stand where a row tells it, as likely as that has been so far.

        Args:
            claimed: by the row, the likeliest first.
        """
        whole = sum(chance for _, chance in claimed)
        factor = self._seen[row].of(1.0, _PRIOR) if row in self._seen else 1.0
        if whole * factor > _SURE:
            factor = _SURE / whole
        return [(token, chance * factor) for token, chance in claimed]

    def learn(self, row: int, claimed: Sequence[Likely], token: int) -> None:
        """Note what the target took where a row told its position."""
        seen = self._seen.setdefault(row, Ratio())
        seen.add(float(any(token == guessed for guessed, _ in claimed)), sum(chance for _, chance in claimed))
        if seen.whole > _MEMORY:
            seen.fade(_MEMORY)

    def worth(self, row: int) -> float:
        """The probability that a row's guesses hold the target's token, where nothing else is known."""
        assumed = 0.6 if row not in self._seen else 0.6 * self._seen[row].of(1.0, _PRIOR)
        return min(_SURE, assumed)


def likeliest_paths(levels: Sequence[Sequence[Likely]], most: int, least: float) -> tuple[list[int], list[int], list[float]]:
    """The ``most`` likeliest paths of one token of each level: tokens, parents and probabilities of a tree's nodes.

    Args:
        levels: of each, what may stand there.
        least: paths less likely than this are left out.
    """
    ranked = [sorted(level, key=lambda each: -each[1]) for level in levels]
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (minus the path's probability, level, parent, its probability, rank): of equals, the shorter path first.
    heap: list[tuple[float, int, int, float, int]] = []

    def push(parent: int, above: float, level: int, rank: int) -> None:
        if level < len(ranked) and rank < len(ranked[level]) and (chance := above * ranked[level][rank][1]) > least:
            heapq.heappush(heap, (-chance, level, parent, above, rank))

    push(ROOT, 1.0, 0, 0)
    while heap and len(tokens) < most:
        negative, level, parent, above, rank = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(ranked[level][rank][0])
        parents.append(parent)
        scores.append(-negative)
        push(parent, above, level, rank + 1)
        push(node, -negative, level + 1, 0)
    return tokens, parents, scores
