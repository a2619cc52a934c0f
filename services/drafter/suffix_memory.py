"""What is remembered of texts to find endings in: their latest tokens, counted a piece at a time, so that nobody waits."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from services.drafter.suffix_automaton import Automaton


class _Counted:
    """An automaton, and which positions of the texts are counted in it: from ``tail`` to ``head``."""

    def __init__(self, automaton: Automaton, begin: int) -> None:
        self.automaton = automaton
        self.begin = self.tail = self.head = begin


class Memory:
    """Texts that grow at their end and are forgotten from their beginning, by position.

    What has been added is found when ``work`` has counted it, and what is to be forgotten until it has uncounted it.
    Uncounted stretches take room until there are as many as counted ones: then the automaton is built anew beside the one in
    use.

    Args:
        depth, likeliest: see ``Automaton``.
    """

    def __init__(self, depth: int, likeliest: int) -> None:
        self._depth, self._likeliest = depth, likeliest
        # The text from position ``_base`` on; before ``begin`` it is to be forgotten.
        self._text = array("i")
        self._base = self.begin = 0
        self._used = self._anew()
        self._next: _Counted | None = None

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self._base + len(self._text)

    @property
    def automaton(self) -> Automaton:
        """What is counted so far. ``work`` may exchange it."""
        return self._used.automaton

    @property
    def complete(self) -> bool:
        """Whether all is counted, and nothing else."""
        return self._used.head == self.end and self._used.tail == self.begin

    @property
    def idle(self) -> bool:
        """Whether there is no work."""
        return self.complete and self._next is None

    def add(self, tokens: Iterable[int]) -> None:
        """Remember more, to be counted by ``work``."""
        self._text.extend(tokens)

    def forget(self, begin: int) -> None:
        """Remember only what comes from position ``begin`` on."""
        self.begin = max(self.begin, begin)
        if self.begin >= self.end:
            self._used, self._next = self._anew(), None
            self._trim()

    def work(self, most: int) -> int:
        """Count and uncount at most so many tokens; returns how many of them are left to do other work with."""
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
        return most

    def _anew(self) -> _Counted:
        return _Counted(Automaton(self._depth, self._likeliest), self.begin)

    def _advance(self, counted: _Counted, most: int) -> int:
        if counted.head == counted.begin:
            # Nothing was counted yet that would have to be uncounted.
            counted.begin = counted.tail = counted.head = self.begin
        until = min(counted.tail + most, counted.head, self.begin)
        counted.automaton.remove(self._text[counted.tail - self._base : until - self._base])
        most -= until - counted.tail
        counted.tail = until
        until = min(counted.head + most, self.end)
        counted.automaton.add(self._text[counted.head - self._base : until - self._base])
        most -= until - counted.head
        counted.head = until
        return most

    def _trim(self) -> None:
        """Let go of text that nobody will read again, when it is the greater part."""
        read = min(each.tail for each in (self._used, self._next) if each is not None)
        if 2 * (read - self._base) > len(self._text):
            del self._text[: read - self._base]
            self._base = read
