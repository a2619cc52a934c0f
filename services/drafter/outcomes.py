"""What a step may commit, likeliest first: the outcomes that drafts are made for beforehand (SSD, PEARL, SpecEdge)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from speculation.tree import ROOT, path_to
from speculation.types import TokenTree

# What the target says at the end of a path: tokens and their probabilities, likeliest first. Rough is enough.
Likely = Callable[[int], Sequence[tuple[int, float]]]

# Of the target's own tokens at the end of a path so many are considered.
_BONUSES = 2


def likeliest_outcomes(tree: TokenTree, likely: Likely, most: int) -> list[tuple[int, ...]]:
    """The ``most`` likeliest sequences of committed tokens: a path of accepted nodes, then the target's own token.

    The walk ends at a node where the target's token is none of its children: so the token behind the path is the likeliest
    one that is not drafted there.
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
