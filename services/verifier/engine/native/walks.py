"""How far the target's choices go down the trees of a pass, in one call; see walks.c."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

from services.verifier.engine.native.library import engine_library
from speculation.types import TokenTree

# The struct walks in walks.h.
_WALKS = struct.Struct("q7P")


def walk_together(
    trees: Sequence[TokenTree], choices: Iterable[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """For each tree the path that the choices lead to, and its tokens with the choice after it. None: nothing is compiled.

    Args:
        trees: without probes.
        choices: after the root and after each node of each tree, one tree after the other.
    """
    library = engine_library()
    if library is None:
        return None
    sizes = array("i", [len(tree.tokens) for tree in trees])
    count, nodes = len(trees), sum(sizes)
    counts, paths, tokens = (array("i", bytes(4 * room)) for room in (count, nodes, nodes + count))
    held = (
        sizes,
        array("i", chain.from_iterable([tree.tokens for tree in trees])),
        array("i", chain.from_iterable([tree.parents for tree in trees])),
        array("i", choices),
        counts,
        paths,
        tokens,
    )
    library.walks_take(_WALKS.pack(count, *[each.buffer_info()[0] for each in held]))
    return _cut(counts.tolist(), tuple(paths), tuple(tokens))


def _cut(
    counts: Sequence[int], paths: tuple[int, ...], tokens: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each path, and its tokens: one more than its nodes."""
    for tree, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        yield paths[begin:end], tokens[begin + tree : end + tree + 1]
