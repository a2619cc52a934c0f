"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Text that may be shown now, and the stop string that ended the answer, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Releases text only once it can no longer be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Found:
        """Add ``piece``. At a complete stop string, the text before its first occurrence is released, the rest dropped."""
        text = self._held + piece
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, _, stop = min(hits)
            self._held = ""
            return Found(text=text[:at], stop=stop)
        keep = self._beginning_of_stop(text)
        self._held = text[len(text) - keep :]
        return Found(text=text[: len(text) - keep])

    def flush(self) -> str:
        """The text held back so far, for an answer that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_stop(self, text: str) -> int:
        """Length of the longest suffix of ``text`` with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
