"""The blend of suffix decoding and token recycling, compiled; see blend.c. The reference is ``BlendSession``."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from typing_extensions import override

from services.drafter.merging.blend import BlendSession, Places
from services.drafter.merging.calibrator import Calibrator
from services.drafter.native.calibrator import CompiledCalibrator
from services.drafter.native.recycling_table import CompiledTable, CompiledTextEnd
from services.drafter.sessions.tree_walk import TreeWalk
from services.drafter.sources import recycling, suffix
from services.drafter.sources.interfaces import PathSession
from services.drafter.sources.recycling import RecyclingSession
from services.drafter.sources.suffix import Place, SuffixSession
from services.drafter.sources.suffix_automaton import NOWHERE, Ending
from services.machine.held_memory import Held
from speculation import limits
from speculation.records import maker
from speculation.types import TokenTree

# The sources that it knows, in the order in which they are asked.
KNOWN = (suffix.NAME, recycling.NAME)
# The structs wanted and candidate in blend.h; the struct session in steps.c in two parts: each step changes the second one.
_WANTED = struct.Struct("5Pd7i4x")
_HELD, _MOVING = struct.Struct("7P2i"), struct.Struct("3i4xQ")
SESSION_BYTES = _HELD.size + _MOVING.size
# The numbers of so many nodes.
_INTS, _DOUBLES = ([struct.Struct(f"{count}{kind}") for count in range(limits.MAX_TREE_NODES + 1)] for kind in "id")
_make_tree = maker(TokenTree)


class _Candidate(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("token", "first", "second")] + [("probability", ctypes.c_double)]


def is_compiled(names: Sequence[str]) -> bool:
    """Whether there is a compiled form of the blend of these sources."""
    return bool(names) and tuple(names) == tuple(name for name in KNOWN if name in names)


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
        # As many sources as there are until one fails.
        self._whole = len(self._sources)
        self._suffix = cast(SuffixSession, sources.get(suffix.NAME))
        self._recycling = cast(RecyclingSession, sources.get(recycling.NAME))
        if self._recycling is not None:
            self._table, self._end = cast(CompiledTable, self._recycling.table), cast(CompiledTextEnd, self._recycling.end)
        self._weights, self._squares = calibrator.weights, calibrator.squares
        # What is left of a draft to be learnt from, and of those for texts that may come.
        self._last, self._other = (Held(library.blend_new(), library.blend_free) for _ in range(2))
        self._wanted = ctypes.create_string_buffer(_WANTED.size)
        self._limits = (0, 0) if self._suffix is None else (self._suffix.config.depth, self._suffix.config.max_endings)
        # What ``before_step`` tells of every step.
        self._learnt = self._last.address, self._weights, self._squares
        recycled = (0, 0) if self._recycling is None else (self._table.address, self._end.address)
        self._unmoved = *recycled, *self._limits
        # Both automata, and what does not change as long as they do not.
        self._told_of: tuple[tuple[int, int], bytes] = (-1, -1), b""
        self._room(0)

    @override
    def draft(self, max_nodes: int) -> TokenTree:
        if len(self._sources) < self._whole or self._models:
            return super().draft(max_nodes)
        try:
            place = None if self._suffix is None else self._suffix.start()
        except Exception:
            return super().draft(max_nodes)
        return self._drafted(self._last, max_nodes, place, self._recycling is not None)

    def before_step(self, many: int, length: int, prefix_hash: int) -> bytes | None:
        """The struct session in steps.c, by which it observes ``many`` tokens and drafts; None: it cannot.

        Args:
            length, prefix_hash: of the session's prefix.
        """
        if len(self._sources) < self._whole or self._models:
            return None
        own = shared = state = size = 0
        if self._suffix is not None:
            try:
                found = self._suffix.before_step(many)
            except Exception:
                return None
            if found is None:
                return None
            own, shared, state, size = found
        automata, held = self._told_of
        if automata != (own, shared):
            held = _HELD.pack(*self._learnt, own, shared, *self._unmoved)
            self._told_of = (own, shared), held
        return held + _MOVING.pack(state, size, length, prefix_hash)

    def after_step(self, tokens: array[int], least: float, end: Ending, shared_end: Ending, *, drafted: bool) -> None:
        """Note what steps.c has done; if it has not ``drafted``, there was no memory to count the tokens."""
        self._least = least
        if not drafted:
            self._lose(suffix.NAME)
        elif self._suffix is not None:
            self._suffix.after_step(tokens, end, shared_end)

    @override
    def likeliest_after(self, node: int) -> list[tuple[int, float]]:
        if self._calibrator is not self._alone:
            return super().likeliest_after(node)
        found = ctypes.POINTER(_Candidate)()
        count = self._library.blend_candidates(self._last.address, node + 1, self._weights, ctypes.addressof(found))
        return sorted(((each.token, each.probability) for each in found[:count]), key=lambda each: -each[1])

    @override
    def _learn(self, committed: Sequence[int]) -> None:
        if self._calibrator is not self._alone:
            super()._learn(committed)
            return
        held = array("i", committed)
        self._library.blend_learn(self._last.address, *held.buffer_info(), self._weights, self._squares)

    @override
    def _grow(self, start: Places, max_nodes: int, *, ahead: bool) -> TokenTree:
        if self._calibrator is not self._alone:
            return super()._grow(start, max_nodes, ahead=ahead)
        places = dict(start)
        end = CompiledTextEnd(places[recycling.NAME]) if ahead and recycling.NAME in places else None
        draft = self._other if ahead else self._last
        return self._drafted(draft, max_nodes, places.get(suffix.NAME), recycling.NAME in places, end)

    def _drafted(
        self, draft: Held, max_nodes: int, place: Place | None, recycled: bool, end: CompiledTextEnd | None = None
    ) -> TokenTree:
        """The likeliest tree.

        Args:
            draft: where what is named is left.
            place: where suffix decoding looks; None: it takes no part.
            recycled: whether token recycling takes part; behind ``end``, or behind the text.
        """
        if max_nodes > self._nodes_room:
            self._room(max_nodes)
        own = shared = table = address = 0
        if place is not None:
            counted, answers = self._suffix.automata
            own, shared = counted.address, answers.address  # type: ignore[union-attr]  # Both are compiled.
        if recycled:
            table, address = self._table.address, (end or self._end).address
        (state, size), (other, length) = place or (NOWHERE, NOWHERE)
        asked = own, shared, table, address, self._weights, self._least, max_nodes, *self._limits, state, size, other, length
        _WANTED.pack_into(self._wanted, 0, *asked)
        count = self._library.blend_draft(draft.address, self._wanted, *self._found)
        ints, doubles = _INTS[count], _DOUBLES[count]
        tokens, parents, named, scores = self._found
        return _make_tree(
            tokens=ints.unpack_from(tokens),
            parents=ints.unpack_from(parents),
            sources=tuple([KNOWN[each] for each in ints.unpack_from(named)]),
            scores=doubles.unpack_from(scores),
        )

    def _room(self, nodes: int) -> None:
        """Make room for trees of so many nodes: their tokens, parents, the numbers of their sources, and scores."""
        self._nodes_room = nodes
        self._found = (*((ctypes.c_int32 * nodes)() for _ in range(3)), (ctypes.c_double * nodes)())
