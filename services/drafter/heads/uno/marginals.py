"""Marginals of the tokens to come, and the tree of their likeliest paths.

A row of noise tells which tokens are likely at its position, likeliest first, and not how likely: no array as long as the
vocabulary leaves the target. How often the target's own token is at each rank of each row is learnt while answers are
written. A path's probability is the product over its levels, since no row knows what the others stand for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from speculation.estimators import Ratio
from speculation.tree import ROOT

# What is assumed of the likeliest token of the first row, of that of each further one, and of each further rank.
_FIRST, _FURTHER, _RANK = 0.6, 0.85, 0.3
# In tokens: how many the assumption weighs as much as, and how many are remembered.
_PRIOR = 8.0
_MEMORY = 512.0

# A token, and how likely it is.
Likely = tuple[int, float]


class RankRates:
    """How often the target's token is at a rank of a row of noise. All requests share it; it holds no text."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Ratio] = {}

    def of(self, row: int, rank: int) -> float:
        """The probability that the target takes the token at ``rank`` of ``row``, where it took a guess at each row before."""
        assumed = _FIRST * _FURTHER**row * _RANK**rank
        seen = self._seen.get((row, rank))
        return assumed if seen is None else seen.of(assumed, _PRIOR)

    def learn(self, row: int, ids: Sequence[int], token: int) -> None:
        """Note which of the likely tokens ``ids`` of a row the target took, or that it took none of them."""
        for rank, guessed in enumerate(ids):
            seen = self._seen.setdefault((row, rank), Ratio())
            seen.add(float(guessed == token), 1.0)
            if seen.whole > _MEMORY:
                seen.fade(_MEMORY)


def likeliest_paths(
    levels: Sequence[Sequence[Likely]], most: int, least: float
) -> tuple[list[int], list[int], list[float]]:
    """The ``most`` likeliest paths of one token of each level: tokens, parents and probabilities of a tree's nodes.

    Args:
        levels: of each, what may stand there.
        least: paths less likely than this are left out.
    """
    ranked = [sorted(level, key=lambda each: -each[1]) for level in levels]
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (minus the path's probability, order of insertion, parent, its probability, level, rank)
    heap: list[tuple[float, int, int, float, int, int]] = []

    def push(parent: int, above: float, level: int, rank: int) -> None:
        if level < len(ranked) and rank < len(ranked[level]) and (chance := above * ranked[level][rank][1]) > least:
            heapq.heappush(heap, (-chance, len(heap) + len(tokens), parent, above, level, rank))

    push(ROOT, 1.0, 0, 0)
    while heap and len(tokens) < most:
        negative, _, parent, above, level, rank = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(ranked[level][rank][0])
        parents.append(parent)
        scores.append(-negative)
        push(parent, above, level, rank + 1)
        push(node, -negative, level + 1, 0)
    return tokens, parents, scores


def chances_to_end(parents: Sequence[int], scores: Sequence[float]) -> dict[int, float]:
    """The nodes, and ``ROOT``, with the chance that the accepted path ends there."""
    rest = {ROOT: 1.0, **dict(enumerate(scores))}
    for parent, score in zip(parents, scores, strict=True):
        rest[parent] -= score
    return rest
