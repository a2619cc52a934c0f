"""The measured budget, whose nodes compiled code ranks and counts: all trees of a step in one call; see nodes.c."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import chain

from services.verifier.engine.native.library import engine_library
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.tree import claims
from speculation.types import TokenTree

_PROBE = -1


class _CostTable(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("rows", "seconds")],
        ("count", ctypes.c_int64),
        *[(name, ctypes.c_double) for name in ("speed", "per_request", "per_key", "per_row_key")],
    ]


class _Load(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "requests", "keys", "row_keys")]


class _Nodes(ctypes.Structure):
    _fields_ = [
        ("trees", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("counts", "parents", "sources", "claimed", "accepted", "seen")],
    ]


def measured_budget(costs: CostTable, *, max_nodes: int, max_step_s: float = math.inf) -> MeasuredBudget:
    """A ``MeasuredBudget``, compiled where that is possible."""
    library = engine_library()
    if library is None:
        return MeasuredBudget(costs, max_nodes=max_nodes, max_step_s=max_step_s)
    return CompiledBudget(library, costs, max_nodes=max_nodes, max_step_s=max_step_s)


class CompiledBudget(MeasuredBudget):
    """A ``MeasuredBudget`` that decides the same, bit for bit."""

    def __init__(self, library: ctypes.PyDLL, costs: CostTable, *, max_nodes: int, max_step_s: float = math.inf) -> None:
        super().__init__(costs, max_nodes=max_nodes, max_step_s=max_step_s)
        self._library = library

    def probabilities(self, tree: TokenTree) -> list[float]:
        found = (ctypes.c_double * len(tree.tokens))()
        columns, held = self._columns([tree])
        self._library.nodes_probabilities(ctypes.addressof(columns), found)
        del held
        return found[:]

    def _ranked(
        self, trees: Sequence[TokenTree], tokens: int, most: float, load: Load, decoding: Load
    ) -> tuple[Sequence[int], int]:
        size = sum([len(tree.tokens) for tree in trees])
        most = int(min(most, size))
        if not most:
            return (), 0
        rows, seconds, terms = self._costs.terms
        own_rows, own_seconds = array("q", rows), array("d", seconds)
        costs = _CostTable(_address(own_rows), _address(own_seconds), len(own_rows), *terms)
        loads = [_Load(each.rows, each.requests, each.keys, each.row_keys) for each in (load, decoding)]
        columns, held = self._columns(trees)
        order = (ctypes.c_int32 * most)()
        addresses = [ctypes.addressof(each) for each in (columns, costs, *loads)]
        count = self._library.nodes_rank(*addresses, tokens, most, order)
        del held
        if count < 0:
            raise MemoryError
        return order[:], count

    def _columns(self, trees: Sequence[TokenTree]) -> tuple[_Nodes, tuple[array[int] | array[float], ...]]:
        """The nodes of trees as compiled code reads them, and the memory that this lies in."""
        names = list(chain.from_iterable([tree.sources for tree in trees]))
        known = {name: number for number, name in enumerate(dict.fromkeys(names))}
        seen = [each for name in known for each in self._acceptance.seen_of(name)]
        held = (
            array("q", [len(tree.tokens) for tree in trees]),
            array("i", chain.from_iterable([tree.parents for tree in trees])),
            array("i", [known[name] for name in names]),
            array("d", chain.from_iterable([claims(tree) for tree in trees])),
            array("d", [each.part for each in seen]),
            array("d", [each.whole for each in seen]),
        )
        first = 0
        for tree in trees:
            for probe in tree.probes:
                held[2][first + probe] = _PROBE
                if not tree.scores:
                    held[3][first + probe] = 0.0
            first += len(tree.tokens)
        return _Nodes(len(trees), *[_address(each) for each in held]), held


def _address(held: array[int] | array[float]) -> int:
    return held.buffer_info()[0]
