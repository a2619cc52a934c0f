"""The blend of suffix decoding and token recycling, compiled; see blend.c. The reference is ``BlendSession``."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from services.drafter.blend import BlendSession, Places
from services.drafter.calibrator import Calibrator
from services.drafter.interfaces import PathSession
from services.drafter.native.automaton import CompiledAutomaton
from services.drafter.native.calibrator import CompiledCalibrator
from services.drafter.native.library import Held
from services.drafter.native.recycling_table import CompiledTable
from services.drafter.sessions.tree_walk import TreeWalk
from services.drafter.sources import recycling, suffix
from services.drafter.sources.recycling import RecyclingSession
from services.drafter.sources.suffix import SuffixSession
from services.drafter.sources.suffix_automaton import NOWHERE
from speculation.records import maker
from speculation.types import TokenTree

# The sources that it knows, in the order in which they are asked.
_KNOWN = (suffix.NAME, recycling.NAME)
# The structs wanted and candidate in blend.h, and the constants there. A context has at most as many tokens as zeros here.
_WANTED = struct.Struct("4Pd3i8i2i12i4x")
_make_tree = maker(TokenTree)
_ZEROS, _PASSED, _PASSED_RANKS = (0, 0, 0), 2, 6


class _Candidate(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("token", "first", "second")] + [("probability", ctypes.c_double)]


def is_compiled(names: Sequence[str]) -> bool:
    """Whether there is a compiled form of the blend of these sources."""
    return bool(names) and tuple(names) == tuple(name for name in _KNOWN if name in names)


class CompiledBlendSession(BlendSession):
    """A ``BlendSession`` of sources with a compiled form. Drafts in which a model takes part are the reference's."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        sources: Mapping[str, PathSession],
        calibrator: CompiledCalibrator,
        models: Mapping[str, TreeWalk],
        joint: Callable[[tuple[str, ...]], Calibrator],
    ) -> None:
        super().__init__(sources, calibrator, models, joint)
        self._library = library
        self._suffix = cast(SuffixSession, sources.get(suffix.NAME))
        self._recycling = cast(RecyclingSession, sources.get(recycling.NAME))
        self._weights, self._squares = calibrator.weights, calibrator.squares
        # What is left of a draft to be learnt from, and of those for texts that may come.
        self._last, self._other = (Held(library.blend_new(), library.blend_free) for _ in range(2))
        self._wanted = ctypes.create_string_buffer(_WANTED.size)
        self._room(0)

    def likeliest_after(self, node: int) -> list[tuple[int, float]]:
        if self._calibrator is not self._alone:
            return super().likeliest_after(node)
        found = ctypes.POINTER(_Candidate)()
        count = self._library.blend_candidates(self._last.address, node + 1, self._weights, ctypes.addressof(found))
        return sorted(((each.token, each.probability) for each in found[:count]), key=lambda each: -each[1])

    def _learn(self, committed: Sequence[int]) -> None:
        if self._calibrator is not self._alone:
            super()._learn(committed)
            return
        held = array("i", committed)
        self._library.blend_learn(self._last.address, *held.buffer_info(), self._weights, self._squares)

    def _grow(self, start: Places, max_nodes: int, *, ahead: bool) -> TokenTree:
        if self._calibrator is not self._alone:
            return super()._grow(start, max_nodes, ahead=ahead)
        if max_nodes > len(self._tokens):
            self._room(max_nodes)
        _WANTED.pack_into(self._wanted, 0, *self._asked(dict(start), max_nodes, ahead))
        draft = self._other if ahead else self._last
        tokens, parents, recycled, scores = self._tokens, self._parents, self._recycled, self._scores
        count = self._library.blend_draft(draft.address, self._wanted, tokens, parents, recycled, scores)
        return _make_tree(
            tokens=tuple(tokens[:count]),
            parents=tuple(parents[:count]),
            sources=tuple([_KNOWN[each] for each in recycled[:count]]),
            scores=tuple(scores[:count]),
        )

    def _room(self, nodes: int) -> None:
        """Make room for trees of so many nodes."""
        self._tokens, self._parents, self._recycled = ((ctypes.c_int32 * nodes)() for _ in range(3))
        self._scores = (ctypes.c_double * nodes)()

    def _asked(self, places: Mapping[str, Any], max_nodes: int, ahead: bool) -> list[float]:
        """What the struct wanted holds. Sources that say nothing take no part."""
        own = shared = table = depth = endings = 0
        (state, size), (other, length) = NOWHERE, NOWHERE
        context: tuple[int, ...] = ()
        passed: Sequence[tuple[int, ...]] = ()
        if suffix.NAME in places:
            (state, size), (other, length) = places[suffix.NAME]
            counted, answers = self._suffix.automata
            own, shared = cast(CompiledAutomaton, counted).address, cast(CompiledAutomaton, answers).address
            depth, endings = self._suffix.config.depth, self._suffix.config.max_endings
        if recycling.NAME in places:
            table, context = cast(CompiledTable, self._recycling.table).address, places[recycling.NAME]
            passed = () if ahead else self._recycling.passed
        counts, ids = [0] * _PASSED, [0] * (_PASSED * _PASSED_RANKS)
        for ago, each in enumerate(passed):
            counts[ago] = count = min(len(each), _PASSED_RANKS)
            ids[ago * _PASSED_RANKS : ago * _PASSED_RANKS + count] = each[:count]
        return [
            own, shared, table, self._weights, self._least, max_nodes, depth, endings, state, size, other, length,
            len(context), *context, *_ZEROS[len(context) :], *counts, *ids,
        ]  # fmt: skip
