"""The likeliest outcomes of a step under way, for which the next drafts can be made ahead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from speculation.tree import ROOT, path_to
from speculation.types import TokenTree

# A rough estimate of the target's choice after a node: tokens and their probabilities, likeliest first.
Likely = Callable[[int], Sequence[tuple[int, float]]]

# Bonus tokens that are considered after each path.
_BONUSES = 2


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
