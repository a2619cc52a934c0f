"""An answer's text in the colours of those who guessed it."""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import TYPE_CHECKING

from cluster.process.terminal import stdout
from speculation.colours import colour_of
from speculation.sources import TARGET

if TYPE_CHECKING:
    from rich.text import Text

    import outrider


class SourcedText:
    """Finds out which piece of a stream's text is of which source. Text may come later than its tokens.

    Attributes:
        tokens: how many tokens each source has guessed.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        # Characters to come of tokens that are here, by source; the last source also gets what no token has counted.
        self._waiting: deque[tuple[str, int]] = deque()
        self._last = TARGET

    def push(self, chunk: outrider.Chunk) -> list[tuple[str, str]]:
        """The chunk's text in pieces, each with its source."""
        for origin in chunk.origins:
            self.tokens[origin.source] += 1
            self._waiting.append((origin.source, origin.text_length))
        pieces, text = list[tuple[str, str]](), chunk.text
        while text:
            while self._waiting and not self._waiting[0][1]:
                self._last, _ = self._waiting.popleft()
            source, left = self._waiting.popleft() if self._waiting else (self._last, len(text))
            pieces.append((source, text[:left]))
            self._last = source
            if left > len(text):
                self._waiting.appendleft((source, left - len(text)))
            text = text[left:]
        return pieces


def print_pieces(pieces: list[tuple[str, str]]) -> None:
    """Print pieces of text to stdout: on a terminal in their sources' colours, elsewhere as they are."""
    from rich.text import Text

    console = stdout()
    for source, text in pieces:
        if console.is_terminal:
            console.print(Text(text, style=colour_of(source)), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)


def legend(tokens: Counter[str]) -> Text:
    """How many tokens are whose, each name in its colour."""
    from rich.text import Text

    names = [*sorted((name for name in tokens if name != TARGET), key=lambda name: -tokens[name]), TARGET]
    parts = [Text.assemble((name, colour_of(name)), f" {tokens[name]}") for name in names]
    return Text.assemble("guessed by: ", Text(", ").join(parts), " (target: guessed by nobody)")
