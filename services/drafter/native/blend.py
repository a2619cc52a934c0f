"""The blend of suffix decoding and token recycling, compiled; see blend.c. The reference is ``BlendSession``."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

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
from services.drafter.sources.suffix_automaton import NOWHERE
from services.machine.held_memory import Held
from speculation import limits
from speculation.records import maker
from speculation.types import TokenTree

# The sources that it knows, in the order in which they are asked.
KNOWN = (suffix.NAME, recycling.NAME)
# The structs wanted and candidate in blend.h.
_WANTED = struct.Struct("5Pd7i4x")
# The numbers of so many nodes.
_INTS, _DOUBLES = ([struct.Struct(f"{count}{kind}") for count in range(limits.MAX_TREE_NODES + 1)] for kind in "id")
# For who looks at no texts of others: they never change, and it may take as many tokens as there are.
_UNCHANGED, _ANY = ctypes.c_int64(0), 2**31 - 1
_make_tree = maker(TokenTree)


class _Candidate(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("token", "first", "second")] + [("probability", ctypes.c_double)]


class _Session(ctypes.Structure):
    """The struct session in steps.c."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("last", "weights", "squares", "own", "shared", "table", "end", "changes")],
        ("known_changes", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("depth", "max_endings")],
        ("hash", ctypes.c_uint64),
        *[(name, ctypes.c_int32) for name in ("length", "room")],
        *[(name, ctypes.c_int32 * 2) for name in ("own_end", "shared_end")],
        ("least", ctypes.c_double),
        ("taken", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("taken_count", "taken_room")],
    ]


class Taken(NamedTuple):
    """What a session has taken without Python: its tokens, and the length and hash of its prefix now."""

    tokens: array[int]
    length: int
    hash: int


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
        # Where it takes steps without Python, until ``settle``.
        self._held = Held(library.session_new(), library.session_free)
        self._session = _Session.from_address(self._held.address)
        session = self._session
        session.weights, session.squares = self._weights, self._squares
        session.depth, session.max_endings = self._limits
        if self._recycling is not None:
            session.table, session.end = self._table.address, self._end.address
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

    def enter(self, length: int, prefix_hash: int) -> int:
        """The address by which steps.c lets this session observe and draft, until ``settle`` is called, which must be before
        anything else is asked of it; 0: it cannot.

        Args:
            length, prefix_hash: of the session's prefix.
        """
        if len(self._sources) < self._whole or self._models:
            return 0
        session = self._session
        session.changes, session.known_changes, session.room = ctypes.addressof(_UNCHANGED), 0, _ANY
        if self._suffix is not None:
            try:
                found = self._suffix.enter()
            except Exception:
                return 0
            if found is None:
                return 0
            session.own, session.shared, session.changes = found.own, found.shared, ctypes.addressof(found.changes)
            session.known_changes, session.room, session.shared_end = found.changes.value, found.room, found.shared_end
        session.length, session.hash = length, prefix_hash
        session.last = self._last.address
        return self._held.address

    def settle(self, *, counted: bool = True) -> Taken | None:
        """Note what steps.c has done since ``enter``; None: nothing.

        Args:
            counted: there was memory to count the tokens.
        """
        session = self._session
        session.last = None
        if not session.taken_count:
            return None
        tokens = array("i", ctypes.string_at(session.taken, 4 * session.taken_count))
        session.taken_count, self._least = 0, session.least
        if not counted:
            self._lose(suffix.NAME)
        elif self._suffix is not None:
            self._suffix.settle(tokens, tuple(session.own_end), tuple(session.shared_end))
        return Taken(tokens, session.length, session.hash)

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
