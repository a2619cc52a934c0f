"""Token recycling's table, compiled; see contexts.c. The reference is ``sources.recycling_table.RecyclingTable``."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

from services.drafter.native.library import Held, drafting_library
from services.drafter.sources.recycling_table import ORDERS, SEEN_KINDS, TOP_KINDS, Context, RecyclingTable
from speculation.types import TokenTree

_UNKNOWN = -1
# In the order of blend.h; at most one candidate of each.
_KINDS = (*chain.from_iterable(TOP_KINDS[order] for order in ORDERS), *SEEN_KINDS)
_MOST = len(_KINDS)
# Bytes of an int32.
_INT = 4


def recycling_table(max_entries: int) -> RecyclingTable | CompiledTable:
    """A table that knows nothing, compiled where that is possible."""
    library = drafting_library()
    return RecyclingTable(max_entries) if library is None else CompiledTable(library, max_entries)


class CompiledTable(Held):
    """As ``RecyclingTable``, of at most eight successors."""

    def __init__(self, library: ctypes.PyDLL, max_entries: int) -> None:
        super().__init__(library.table_new(max_entries), library.table_free)
        self._library = library
        self._learn = library.table_learn
        # The struct in contexts.h.
        self._context = array("i", bytes(16))
        self._at = self._context.buffer_info()[0]
        # Of ``candidates``: token and kind, of each.
        self._found = (ctypes.c_int32 * (2 * _MOST))()

    def learn(self, context: Context, tree: TokenTree, top_ids: Sequence[tuple[int, ...]]) -> None:
        nodes = len(tree.tokens)
        if not len(tree.parents) == nodes < len(top_ids):
            raise ValueError(f"there are ids after {len(top_ids)} nodes: must be one more than the {nodes} of the tree")
        self._put(context)
        # One array, since each costs as much as the call.
        told = array("i", (*tree.tokens, *tree.parents, *map(len, top_ids), *chain.from_iterable(top_ids)))
        at = told.buffer_info()[0]
        parents, counts = at + _INT * nodes, at + 2 * _INT * nodes
        self._learn(self.address, self._at, at, parents, nodes, counts + _INT * len(top_ids), counts)

    def read(self, context: Context, tokens: Sequence[int]) -> Context:
        self._put(context)
        held = array("i", tokens)
        self._library.table_read(self.address, self._at, *held.buffer_info())
        return tuple(self._context[1 : 1 + self._context[0]])

    def candidates(self, context: Context) -> list[tuple[int, str]]:
        self._put(context)
        count = self._library.recycling_candidates(self.address, self._at, self._found, _MOST)
        told = self._found[: 2 * count]
        return list(zip(told[::2], map(_KINDS.__getitem__, told[1::2]), strict=True))

    def top(self, key: Context) -> tuple[int, ...]:
        self._put(key)
        ids = ctypes.POINTER(ctypes.c_int32)()
        count = self._library.table_top(self.address, self._at, len(key), ctypes.addressof(ids))
        return tuple(ids[:count])

    def seen(self, key: Context) -> int | None:
        self._put(key)
        found = int(self._library.table_seen(self.address, self._at, len(key)))
        return None if found == _UNKNOWN else found

    def _put(self, context: Context) -> None:
        held = self._context
        held[0] = len(context)
        for place, token in enumerate(context, 1):
            held[place] = token
