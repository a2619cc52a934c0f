"""How far the target's choices go down the trees of a pass, in one call; see walks.c."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from services.verifier.engine.native.library import engine_library
from speculation.arrays import array_of

# The struct walks in walks.h.
_WALKS = struct.Struct("q7P")


class ChosenPaths(NamedTuple):
    """For each tree the path that the choices lead to, and its tokens with the choice after it."""

    paths: list[tuple[int, ...]]
    tokens: list[tuple[int, ...]]


def walk_together(
    counts: Sequence[int], tokens: Iterable[int], parents: Iterable[int], choices: Iterable[int]
) -> ChosenPaths | None:
    """Go down all trees, which have no probes. None: nothing is compiled.

    Args:
        counts: nodes of each tree.
        tokens: the root's and the nodes', tree after tree; ``parents``: the nodes', likewise.
        choices: after the root and after each node, likewise; those that no walk reaches may be anything.
    """
    library = engine_library()
    if library is None:
        return None
    count, nodes = len(counts), sum(counts)
    accepted, paths, taken = (array("i", bytes(4 * room)) for room in (count, nodes, nodes + count))
    held = (*(array_of("i", each) for each in (counts, tokens, parents, choices)), accepted, paths, taken)
    library.walks_take(_WALKS.pack(count, *[each.buffer_info()[0] for each in held]))
    ends = [*accumulate(accepted, initial=0)]
    all_nodes, all_tokens = tuple(paths), tuple(taken)
    return ChosenPaths(
        [all_nodes[begin:end] for begin, end in pairwise(ends)],
        # One more than its nodes.
        [all_tokens[begin + tree : end + tree + 1] for tree, (begin, end) in enumerate(pairwise(ends))],
    )
