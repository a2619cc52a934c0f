"""Turns the scores that sources give their drafts into probabilities of acceptance, learnt while running."""

from __future__ import annotations

import math
from collections.abc import Collection

from speculation.estimators import Ratio
from speculation.tree import ROOT, claims
from speculation.types import TokenTree

# Buckets of scores are logarithmic, ``_STEPS_PER_HALF`` of them between a score and its half.
_STEPS_PER_HALF = 2
_BUCKETS = 16
# In nodes: how many the source's own claim weighs as much as, and how many a bucket remembers.
_PRIOR = 8.0
_MEMORY = 512.0


class AcceptanceRates:
    """One table per source: the accepted share of its nodes, by bucket of the score that they claimed.

    A node's score claims the probability that the target takes the whole path to it. A source without scores claims 1/2 for
    every further token. All requests share what is learnt; it holds no text.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], Ratio] = {}

    def probabilities(self, tree: TokenTree) -> list[float]:
        """The probability that each node is accepted, capped at its parent's: no node may be chosen before its parent.

        A probe is never accepted; its value is the score that its source gave it for the tokens that it brings later.
        """
        found: list[float] = []
        probes = set(tree.probes)
        for node, claimed in enumerate(claims(tree)):
            if node in probes:
                probability = claimed if tree.scores else 0.0
            else:
                seen = self._seen.get((tree.sources[node], _bucket(claimed)))
                probability = claimed if seen is None else seen.of(claimed, _PRIOR)
            parent = tree.parents[node]
            found.append(probability if parent == ROOT else min(probability, found[parent]))
        return found

    def learn(self, tree: TokenTree, accepted_path: Collection[int]) -> None:
        """Learn which of the verified nodes were accepted."""
        for node, claimed in enumerate(claims(tree)):
            if node in tree.probes:
                continue
            key = (tree.sources[node], _bucket(claimed))
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = Ratio()
            seen.add(node in accepted_path, 1.0)
            if seen.whole > _MEMORY:
                seen.fade(_MEMORY)


def _bucket(score: float) -> int:
    if score <= 0:
        return _BUCKETS - 1
    return min(_BUCKETS - 1, int(-math.log2(score) * _STEPS_PER_HALF))
