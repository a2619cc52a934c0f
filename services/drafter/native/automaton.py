"""The counted suffix automaton, compiled; see automaton.c. The reference is ``sources.suffix_automaton.Automaton``."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable

from services.drafter.native.library import drafting_library
from services.drafter.sources.suffix_automaton import NOWHERE, Automaton, Ending
from services.machine.held_memory import Held

# The constant in automaton.h.
_MOST_FOLLOWERS = 4


def counting_automaton(depth: int, likeliest: int) -> Automaton | CompiledAutomaton:
    """An automaton without tokens, compiled where that is possible; arguments as of ``Automaton``."""
    library = drafting_library() if likeliest == _MOST_FOLLOWERS else None
    return Automaton(depth, likeliest) if library is None else CompiledAutomaton(library, depth)


class CompiledAutomaton(Held):
    """As ``Automaton``, attribute for attribute."""

    def __init__(self, library: ctypes.PyDLL, depth: int) -> None:
        super().__init__(library.automaton_new(depth), library.automaton_free)
        self.changes = 0
        self.head = NOWHERE
        self._library = library
        self._add = library.automaton_add
        self._head = (ctypes.c_int32 * 2)()
        # Of ``followers``: token, count and count of all, of each.
        self._found = (ctypes.c_int32 * (3 * _MOST_FOLLOWERS))()

    @property
    def states(self) -> int:
        return int(self._library.automaton_states(self.address))

    def add(self, tokens: Iterable[int]) -> None:
        held = _numbers(tokens)
        self.changes += 1
        if not self._add(self.address, *held.buffer_info(), self._head):
            raise MemoryError
        self.head = self._head[0], self._head[1]

    def counted(self, head: Ending) -> None:
        """Note that tokens were counted by compiled code, behind which the text ends at ``head``."""
        self.changes += 1
        self.head = head

    def remove(self, tokens: Iterable[int]) -> None:
        held = _numbers(tokens)
        self.changes += 1
        self._library.automaton_remove(self.address, *held.buffer_info())

    def find(self, tokens: Iterable[int], ending: Ending = NOWHERE) -> Ending:
        held = _numbers(tokens)
        found = self._library.automaton_find(self.address, *ending, *held.buffer_info())
        return found >> 32, found & 0xFFFFFFFF

    def follow(self, ending: Ending, token: int) -> Ending:
        return self.find((token,), ending)

    def shortened(self, state: int, size: int) -> int:
        return int(self._library.automaton_shortened(self.address, state, size))

    def shorter(self, state: int) -> int:
        return int(self._library.automaton_shorter(self.address, state))

    def count(self, state: int) -> int:
        return int(self._library.automaton_count(self.address, state))

    def candidates(
        self, other: CompiledAutomaton, place: tuple[Ending, Ending], depth: int, max_endings: int
    ) -> list[tuple[int, int]]:
        """As ``SuffixSession.candidates``, of two automata: tokens, each with the number of its kind."""
        most = 2 * _MOST_FOLLOWERS * depth
        found = (ctypes.c_int32 * (2 * most))()
        asked = (self.address, other.address, depth, max_endings, *place[0], *place[1])
        told = found[: 2 * self._library.suffix_candidates(*asked, found, most)]
        return list(zip(told[::2], told[1::2], strict=True))

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        count = self._library.automaton_followers(self.address, state, self._found)
        found = self._found
        return [(found[at], found[at + 1], found[at + 2]) for at in range(0, 3 * count, 3)]


def _numbers(tokens: Iterable[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("i", tokens)
