"""An answer's text as it comes, for readers that go through it once.

A reader is a generator. It yields where the text so far says no more, and goes on where it was once more has come: so the
parts of a text that is cut anywhere are read as the whole would be, in time that grows as the text does.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

_Found = TypeVar("_Found")
# What a reader is while it reads, and what it has found at its end.
Reading: TypeAlias = Generator[None, None, _Found]

_SPACE = re.compile(r"\s*")
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,;:{}\[\]\"<]*")
# Characters of a name, which stands before its mark.
MOST_NAME = 256


class EndedError(Exception):
    """The text has ended where more of it was needed."""


class OtherwiseError(Exception):
    """The text is not what the reader reads."""


class Tape:
    """A text that comes in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] = []

    def feed(self, text: str) -> None:
        """Add a piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def empty(self) -> bool:
        """Whether all text so far has been read."""
        return self._at == len(self._text)

    def forget(self) -> str:
        """What has been read since this was last called."""
        taken, self._taken = "".join(self._taken), []
        return taken

    def put_back(self, text: str) -> None:
        """Have a text, which was read last, read again."""
        taken = self.forget()
        self._taken.append(taken.removesuffix(text))
        self._text, self._at = text + self._text[self._at :], 0

    def more(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            EndedError: none comes.
        """
        if self._ended:
            raise EndedError
        yield

    def take(self, end: int) -> str:
        """The text that has come, up to a position of ``find``."""
        text, self._at = self._text[self._at : end], end
        self._taken.append(text)
        return text

    def rest(self, keep: int = 0) -> str:
        """All that has come, but the last ``keep`` characters."""
        return self.take(max(self._at, len(self._text) - keep))

    def find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Where something is in what has come and was not read."""
        return pattern.search(self._text, self._at)

    def begun(self, marks: tuple[str, ...]) -> int:
        """Length of the longest end of what has come with which one of some marks begins."""
        most = min(max(map(len, marks)) - 1, len(self._text) - self._at)
        ends = (self._text[len(self._text) - size :] for size in range(most, 0, -1))
        return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)

    def space(self) -> Reading[str]:
        """White space, perhaps none."""
        found = ""
        while True:
            match = _SPACE.match(self._text, self._at)
            found += self.take(self._at if match is None else match.end())
            if not self.empty or self._ended:
                return found
            yield

    def peek(self) -> Reading[str]:
        """The next character, which stays unread.

        Raises:
            EndedError: there is none.
        """
        while self.empty:
            yield from self.more()
        return self._text[self._at]

    def accept(self, literal: str) -> Reading[bool]:
        """Whether the text goes on with ``literal``, which is then read.

        Raises:
            EndedError: it ends within it.
        """
        while not self._text.startswith(literal, self._at):
            if len(self._text) - self._at >= len(literal) or not literal.startswith(self._text[self._at :]):
                return False
            yield from self.more()
        self.take(self._at + len(literal))
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Read ``literal``.

        Raises:
            EndedError: the text ends within it.
            OtherwiseError: it goes on otherwise.
        """
        if not (yield from self.accept(literal)):
            raise OtherwiseError

    def until(self, *marks: str, most: int | None = None) -> Reading[tuple[str, str]]:
        """The text before the first of some marks, and the mark, which is read, too.

        Args:
            most: characters that the text may have.

        Raises:
            EndedError: no mark comes.
            OtherwiseError: the text is longer.
        """
        pattern, found, length = re.compile("|".join(map(re.escape, marks))), list[str](), 0
        while True:
            hit = pattern.search(self._text, self._at)
            end = max(self._at, len(self._text) - self.begun(marks)) if hit is None else hit.start()
            if most is not None and length + end - self._at > most:
                # No further, however much has come: what follows may begin something else.
                self.take(self._at + most + 1 - length)
                raise OtherwiseError
            found.append(self.take(end))
            length += len(found[-1])
            if hit is not None:
                self.take(hit.end())
                return "".join(found), hit[0]
            yield from self.more()

    def json(self) -> Reading[str]:
        """The text of a JSON value, behind white space; only its brackets and quotes are looked at.

        Raises:
            EndedError: it does not end.
            OtherwiseError: there is none.
        """
        yield from self.space()
        first = yield from self.peek()
        if first not in '{["':
            return (yield from self._scalar())
        found, depth, inside = list[str](), 0, False
        while True:
            hit = (_INSIDE if inside else _OUTSIDE).search(self._text, self._at)
            if hit is None or (hit[0] == "\\" and hit.end() == len(self._text)):
                found.append(self.rest(0 if hit is None else 1))
                yield from self.more()
                continue
            found.append(self.take(hit.end() + (hit[0] == "\\")))
            if hit[0] == '"':
                inside = not inside
            elif not inside:
                depth += 1 if hit[0] in "{[" else -1
            if not inside and depth <= 0:
                return "".join(found)

    def _scalar(self) -> Reading[str]:
        found = ""
        while True:
            match = _SCALAR.match(self._text, self._at)
            found += self.take(self._at if match is None else match.end())
            if not self.empty or self._ended:
                if not found:
                    raise OtherwiseError
                return found
            yield
