"""Texts in which suffixes are looked up. They are counted a piece at a time, so that no call takes long."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence

from services.drafter.native.automaton import CompiledAutomaton, counting_automaton
from services.drafter.sources.suffix_automaton import Automaton, Ending


class _Counted:
    """An automaton that counts positions ``tail`` to ``head`` of the texts; its first one was ``begin``."""

    def __init__(self, automaton: Automaton | CompiledAutomaton, begin: int) -> None:
        self.automaton = automaton
        self.begin = self.tail = self.head = begin


class Memory:
    """Texts that grow at their end and are forgotten from their beginning, by position.

    Added tokens are found once ``work`` has counted them; forgotten ones are found until ``work`` has uncounted them.
    Uncounted n-grams still take memory. When there are more uncounted than kept tokens, a new automaton is built beside the
    one in use.

    Args:
        depth, likeliest: see ``Automaton``.

    Attributes:
        begin: what lies before this position is to be forgotten.
        end: position behind the last token.
        automaton: the counts so far. ``work`` may replace it.
        idle: ``work`` has nothing to do.
        changes: counts them, where compiled code can read it; what ``read`` and ``counted`` add is none.
    """

    def __init__(self, depth: int, likeliest: int) -> None:
        self._depth, self._likeliest = depth, likeliest
        # The text from position ``_base`` on.
        self._text = array("i")
        self._base = self.begin = self.end = 0
        self._used = self._anew()
        self._next: _Counted | None = None
        self.changes = ctypes.c_int64(0)
        self._look()

    @property
    def complete(self) -> bool:
        """Whether exactly the remembered text is counted."""
        return self._used.head == self.end and self._used.tail == self.begin

    def _look(self) -> None:
        """Set what is asked for in every step."""
        self.changes.value += 1
        self.automaton: Automaton | CompiledAutomaton = self._used.automaton
        self.idle = self._next is None and self.complete

    def add(self, tokens: Iterable[int]) -> None:
        """Append tokens; ``work`` will count them."""
        self._text.extend(tokens)
        self.end = self._base + len(self._text)
        self._look()

    def read(self, tokens: Sequence[int], most: int) -> int:
        """``add`` tokens and ``work``: where nothing else is left to do, in one go."""
        if len(tokens) > most or not self.idle:
            self.add(tokens)
            return self.work(most)
        added = array("i", tokens)
        self._used.automaton.add(added)
        self._text.extend(added)
        self._used.head = self.end = self.end + len(added)
        return most - len(added)

    def counted(self, tokens: array[int], head: Ending) -> None:
        """Note that compiled code has counted ``tokens`` behind a text that had been counted whole; it ends at ``head``."""
        self._used.automaton.counted(head)  # type: ignore[union-attr]  # It is compiled.
        self._text.extend(tokens)
        self._used.head = self.end = self.end + len(tokens)

    def forget(self, begin: int) -> None:
        """Forget what lies before position ``begin``."""
        self.begin = max(self.begin, begin)
        if self.begin >= self.end:
            self._used, self._next = self._anew(), None
            self._trim()
        self._look()

    def work(self, most: int) -> int:
        """Count and uncount at most ``most`` tokens; returns how many of these were not needed."""
        if self.idle:
            return most
        most = self._advance(self._used, most)
        forgotten, kept = self._used.tail - self._used.begin, self.end - self.begin
        if self._next is None and forgotten > kept:
            self._next = self._anew()
        if self._next is not None:
            most = self._advance(self._next, most)
            if self._next.head == self._used.head == self.end:
                self._used, self._next = self._next, None
        self._trim()
        self._look()
        return most

    def _anew(self) -> _Counted:
        return _Counted(counting_automaton(self._depth, self._likeliest), self.begin)

    def _advance(self, counted: _Counted, most: int) -> int:
        if counted.head == counted.begin:
            # Nothing is counted yet, so nothing has to be uncounted: start at the present beginning.
            counted.begin = counted.tail = counted.head = self.begin
        until = min(counted.tail + most, counted.head, self.begin)
        if until > counted.tail:
            counted.automaton.remove(self._text[counted.tail - self._base : until - self._base])
            most -= until - counted.tail
            counted.tail = until
        until = min(counted.head + most, self.end)
        if until > counted.head:
            counted.automaton.add(self._text[counted.head - self._base : until - self._base])
            most -= until - counted.head
            counted.head = until
        return most

    def _trim(self) -> None:
        """Drop text that will not be read again, once it is more than half of all."""
        read = self._used.tail if self._next is None else min(self._used.tail, self._next.tail)
        if 2 * (read - self._base) > len(self._text):
            del self._text[: read - self._base]
            self._base = read
            self.end = self._base + len(self._text)
