"""One choice's chunks, cut into pieces of text with exactly the tokens that they consist of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from services.api.messages import TextChunk
from services.api.origins import ReportedPass
from speculation.types import TokenLogprobs


@dataclass(kw_only=True, slots=True)
class TextToken:
    """A token of an answer.

    Attributes:
        text: what it adds to the answer's text; empty within a character, and for a special token.
        start: characters of the answer before it.
        source: who guessed it; empty: the request does not ask.
        begins: the pass whose first token it is, where the request asks for it.
        shown: it is part of the text, not of a stop string that was cut off.
    """

    id: int
    start: int
    end: int
    logprobs: TokenLogprobs | None
    text: str = ""
    source: str = ""
    begins: ReportedPass | None = None
    shown: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of an answer."""

    text: str
    tokens: tuple[TextToken, ...]


class ChoiceText:
    """Joins tokens with their text, which may come later (``TextChunk.text_ends``).

    Args:
        interval: tokens of a piece; None: as many as there are.
        stops: a stop string may end the answer. Whether a token without text is a part of it is seen at the next text.

    Attributes:
        tokens: how many have come.
    """

    def __init__(self, interval: int | None, *, stops: bool = False) -> None:
        self._interval, self._stops = interval, stops
        # Text that belongs to no piece yet, and where it begins and ends in the answer.
        self._text = ""
        self._begin = 0
        self._end = 0
        self._waiting: deque[TextToken] = deque()
        self._known = 0
        self.tokens = 0

    def push(self, chunk: TextChunk) -> list[Piece]:
        """The pieces that a chunk completes."""
        self._text += chunk.text
        self._end += len(chunk.text)
        self.tokens += len(chunk.token_ids)
        for index, (token, end) in enumerate(zip(chunk.token_ids, chunk.text_ends, strict=True)):
            logprobs = chunk.logprobs[index] if chunk.logprobs else None
            source = chunk.origins[index].source if chunk.origins else ""
            self._waiting.append(TextToken(id=token, start=self._known, end=end, logprobs=logprobs, source=source))
            self._known = end
        if chunk.passes:
            self._waiting[-len(chunk.token_ids)].begins = chunk.passes[0]
        end, stops = self._end, self._stops
        # Ends never fall, so what is not ready is last. Those without text may be many, and are not looked at again.
        ready = sum(1 for _ in takewhile(lambda each: each.end <= end and not (stops and each.start == end), self._waiting))
        if chunk.incomplete or not chunk.token_ids:
            # The last token goes with what is left of its text at the answer's end.
            ready = min(ready, max(0, len(self._waiting) - 1))
        size = self._interval or ready
        return [self._cut(size) for _ in range(ready // size)] if ready else []

    def finish(self, stop: str | None, *, include_stop: bool) -> list[Piece]:
        """The last pieces.

        Args:
            stop: the stop string that has ended the answer, if one did.
        """
        if stop is not None and include_stop:
            self._text += stop
            self._end += len(stop)
        if stop is not None:
            for token in self._waiting:
                token.shown = token.start < self._end
                token.end = min(token.end, self._end)
        pieces = []
        while len(self._waiting) > (self._interval or len(self._waiting)):
            pieces.append(self._cut(self._interval or 0))
        if self._waiting:
            # An incomplete character at the very end belongs to the last token.
            self._waiting[-1].end = self._end
        if self._waiting or self._text:
            pieces.append(self._cut(len(self._waiting)))
        return pieces

    def _cut(self, count: int) -> Piece:
        """The piece of the next ``count`` tokens; without any, of all text."""
        tokens = tuple(self._waiting.popleft() for _ in range(count))
        end = tokens[-1].end if tokens else self._end
        text, self._text = self._text[: end - self._begin], self._text[end - self._begin :]
        for token in tokens:
            token.text = text[max(0, token.start - self._begin) : max(0, token.end - self._begin)]
        self._begin = end
        return Piece(text=text, tokens=tokens)
