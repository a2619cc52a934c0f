"""Checks the trees of a message of drafts in one call; see trees.c. The reference is ``speculation.tree.validate``."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable

from services.verifier.engine.native.library import engine_library
from speculation import limits
from speculation.arrays import array_of
from speculation.columns import DraftColumns

# The struct told_trees in trees.h.
_TREES = struct.Struct("q5P")
MALFORMED = -1


class TreeCheck:
    """Says which drafts of a message are sound.

    Args:
        served: those of a request's sources that may draft for it here.
    """

    def __init__(self, drafts: DraftColumns, vocab_size: int, served: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        self._names, self._served = drafts.source_names, served
        self._named = named_sources(drafts, vocab_size)
        # By a request's sources: those that its drafts may name.
        self._allowed: dict[tuple[str, ...], int] = {}

    def sound(self, at: int, sources: tuple[str, ...]) -> bool:
        """Whether ``validate`` lets a draft pass, of a request with these sources; False, too, where that is not known."""
        if self._named is None or self._named[at] == MALFORMED:
            return False
        if sources not in self._allowed:
            self._allowed[sources] = _bits_of(self._served(sources), self._names)
        return not self._named[at] & ~self._allowed[sources]


def named_sources(drafts: DraftColumns, vocab_size: int) -> list[int] | None:
    """The sources that each draft names: a bit for each of ``source_names``, or ``MALFORMED``. None: nothing is compiled."""
    library = engine_library()
    if library is None:
        return None
    try:
        held: tuple[array[int] | array[float], ...] = (
            array_of("q", drafts.node_counts),
            *(array("i", column) for column in (drafts.tokens, drafts.parents, drafts.sources)),
            array_of("d", drafts.scores),
        )
    except OverflowError:
        return None
    named = array("q", bytes(8 * len(drafts)))
    told = _TREES.pack(len(drafts), *[each.buffer_info()[0] for each in held])
    library.trees_check(told, vocab_size, limits.MAX_TREE_NODES, named.buffer_info()[0])
    return named.tolist()


def _bits_of(sources: Iterable[str], names: tuple[str, ...]) -> int:
    """Those of ``names`` that are among ``sources``, as ``named_sources`` has them.

    >>> _bits_of(("suffix", "eagle3"), ("recycling", "suffix"))
    2
    """
    known = frozenset(sources)
    return sum([1 << number for number, name in enumerate(names) if name in known])
