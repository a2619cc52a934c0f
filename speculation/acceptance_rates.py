"""From what sources claim to what the target does: scores become probabilities of acceptance, learnt online."""

from __future__ import annotations

import math
from collections.abc import Collection

from speculation.tree import ROOT, claims
from speculation.types import TokenTree

# Scores are sorted into buckets that halve: above 1/2, above 1/4, ... with steps between.
_STEPS_PER_HALF = 2
_BUCKETS = 16
# A bucket believes its source until it has seen about so many nodes, and forgets what is older than so many.
_PRIOR = 8.0
_MEMORY = 512.0


class AcceptanceRates:
    """One table per source: of the nodes that claimed about so much, which share was accepted?

    A node's score claims the probability that the target takes the whole path to it. A source without scores claims 1/2 for
    every further token. What is learnt is shared by all requests, and holds no text.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}

    def probabilities(self, tree: TokenTree) -> list[float]:
        """For every node the probability that it is accepted; for probes what they are held to be worth: they are never
        accepted, and bring tokens later. Never above its parent's: alone, a node would be checked behind another text."""
        found: list[float] = []
        probes = set(tree.probes)
        for node, claimed in enumerate(claims(tree)):
            if node in probes:
                probability = claimed if tree.scores else 0.0
            else:
                accepted, count = self._seen.get((tree.sources[node], _bucket(claimed)), (0.0, 0.0))
                probability = (_PRIOR * claimed + accepted) / (_PRIOR + count)
            parent = tree.parents[node]
            found.append(probability if parent == ROOT else min(probability, found[parent]))
        return found

    def learn(self, tree: TokenTree, accepted_path: Collection[int]) -> None:
        """Take note of which of the verified nodes were accepted."""
        for node, claimed in enumerate(claims(tree)):
            if node in tree.probes:
                continue
            key = (tree.sources[node], _bucket(claimed))
            accepted, count = self._seen.get(key, (0.0, 0.0))
            fade = min(1.0, _MEMORY / (count + 1))
            self._seen[key] = ((accepted + (node in accepted_path)) * fade, (count + 1) * fade)


def _bucket(score: float) -> int:
    if score <= 0:
        return _BUCKETS - 1
    return min(_BUCKETS - 1, int(-math.log2(score) * _STEPS_PER_HALF))
