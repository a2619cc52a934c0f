"""The measured budget, for all trees of a step in one call: compiled code ranks, counts and learns; see nodes.c."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_

from typing_extensions import override

from services.verifier.engine.native.library import engine_library
from speculation.arrays import array_of
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.tree import claims
from speculation.types import TokenTree

_PROBE = -1
# The constant in nodes.h.
_BUCKETS = 16


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
        # What AcceptanceRates holds: sources by their number, and of each, bucket by bucket, accepted nodes and all of them.
        self._sources: dict[str, int] = {}
        self._accepted, self._seen = array("d"), array("d")
        # The trees that were told last, without empty ones, and their columns: a step that checks all learns from these.
        self._told: tuple[list[TokenTree], tuple[array[int] | array[float], ...]] = [], ()

    @override
    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        self._costs.learn(load, seconds)
        if not outcomes:
            return
        columns, held = self._columns([tree for tree, _ in outcomes])
        hits = bytearray(sum([len(tree.tokens) for tree, _ in outcomes]))
        first = 0
        for tree, accepted_path in outcomes:
            for node in accepted_path:
                hits[first + node] = 1
            first += len(tree.tokens)
        self._library.nodes_learn(ctypes.addressof(columns), bytes(hits))
        del held

    @override
    def probabilities(self, tree: TokenTree) -> list[float]:
        found = (ctypes.c_double * len(tree.tokens))()
        columns, held = self._columns([tree])
        self._library.nodes_probabilities(ctypes.addressof(columns), found)
        del held
        return found[:]

    @override
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
        trees = [tree for tree in trees if tree.tokens]
        told, held = self._told
        if len(told) != len(trees) or not all(map(is_, told, trees)):
            held = self._anew(trees)
            self._told = trees, held
        return _Nodes(len(trees), *[_address(each) for each in (*held, self._accepted, self._seen)]), held

    def _anew(self, trees: Sequence[TokenTree]) -> tuple[array[int] | array[float], ...]:
        names = list(chain.from_iterable([tree.sources for tree in trees]))
        known = self._numbers(names)
        held = (
            array_of("q", [len(tree.tokens) for tree in trees]),
            array_of("i", chain.from_iterable([tree.parents for tree in trees])),
            array_of("i", [known[name] for name in names]),
            # As compiled code reads it, a score claims what ``claims`` says.
            array_of("d", chain.from_iterable([tree.scores or claims(tree) for tree in trees])),
        )
        first = 0
        for tree in trees:
            for probe in tree.probes:
                held[2][first + probe] = _PROBE
                if not tree.scores:
                    held[3][first + probe] = 0.0
            first += len(tree.tokens)
        return held

    def _numbers(self, names: Iterable[str]) -> Mapping[str, int]:
        """The number of each source; one that is new has seen nothing."""
        for name in dict.fromkeys(names):
            if name not in self._sources:
                self._sources[name] = len(self._sources)
                for each in (self._accepted, self._seen):
                    each.extend([0.0] * _BUCKETS)
        return self._sources


def _address(held: array[int] | array[float]) -> int:
    return held.buffer_info()[0]
