"""Token recycling's table, compiled; see contexts.c. The reference is ``sources.recycling_table.RecyclingTable``."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

from services.drafter.native.library import drafting_library
from services.drafter.sources.recycling_table import ORDERS, PASSED, SEEN_KINDS, TOP_KINDS, Context, RecyclingTable
from services.machine.held_memory import Held
from speculation.messages import StepReport

_UNKNOWN = -1
# In the order of blend.h; at most one candidate of each.
_KINDS = (*chain.from_iterable(TOP_KINDS[order] for order in ORDERS), *SEEN_KINDS)
_MOST = len(_KINDS)
# The constants in contexts.h, and the numbers in its struct text_end.
_LONGEST, _PASSED_RANKS = 3, 6
_END = 1 + _LONGEST + PASSED + PASSED * _PASSED_RANKS


def recycling_table(max_entries: int) -> RecyclingTable | CompiledTable:
    """A table that knows nothing, compiled where that is possible."""
    library = drafting_library()
    return RecyclingTable(max_entries) if library is None else CompiledTable(library, max_entries)


class CompiledTextEnd:
    """As ``TextEnd``. Of what was passed over, only as many tokens are kept as have a kind.

    Attributes:
        address: of the struct text_end.
    """

    def __init__(self, context: Context) -> None:
        self._held = array("i", (len(context), *context)) + array("i", bytes(4 * (_END - 1 - len(context))))
        self.address = self._held.buffer_info()[0]

    @property
    def context(self) -> Context:
        return tuple(self._held[1 : 1 + self._held[0]])

    @property
    def passed(self) -> list[tuple[int, ...]]:
        ids = 1 + _LONGEST + PASSED
        counts = self._held[1 + _LONGEST : ids]
        return [
            tuple(self._held[at : at + count]) for at, count in zip(range(ids, _END, _PASSED_RANKS), counts, strict=True)
        ]


class CompiledTable(Held):
    """As ``RecyclingTable``, of at most eight successors."""

    def __init__(self, library: ctypes.PyDLL, max_entries: int) -> None:
        super().__init__(library.table_new(max_entries), library.table_free)
        self._library = library
        self._observe = library.table_observe
        # The struct in contexts.h.
        self._context = array("i", bytes(16))
        self._at = self._context.buffer_info()[0]
        # Of ``candidates``: token and kind, of each.
        self._found = (ctypes.c_int32 * (2 * _MOST))()

    def begin(self, tokens: Sequence[int]) -> CompiledTextEnd:
        end = CompiledTextEnd(())
        held = array("i", tokens)
        self._library.table_read(self.address, end.address, *held.buffer_info())
        return end

    def observe(self, end: CompiledTextEnd, report: StepReport) -> None:
        """As ``RecyclingTable.observe``.

        Raises:
            ValueError: what was observed does not fit its tree.
        """
        committed, seen = report.committed, report.observation
        if seen is None or not seen.top_ids:
            held = array("i", committed)
            self._library.table_read(self.address, end.address, *held.buffer_info())
            return
        path, tree, rows = report.accepted_path, seen.tree, seen.top_ids
        nodes = len(tree.tokens)
        if not len(tree.parents) == nodes < len(rows):
            raise ValueError(f"there are ids after {len(rows)} nodes: must be one more than the {nodes} of the tree")
        # One array, since each costs as much as the call.
        told = array("i", [*committed, *path, *tree.tokens, *tree.parents, *map(len, rows), *chain.from_iterable(rows)])
        sizes = len(committed), len(path), nodes, len(rows)
        if not self._observe(self.address, end.address, told.buffer_info()[0], *sizes):
            raise ValueError(f"the accepted path is {path}: must be nodes of a tree that has {nodes}")

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
