"""Which drafts an answer went without, and why, as its user is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

# Why a step checks no draft of a source, or less than all of it, though its request is drafted for by its paper's rule.
Why = Literal["share", "deadline", "silent", "lost", "failed"]
_WORDS: dict[Why, str] = {
    "share": "what other requests may lose by it (verifier.named_share) was used up",
    "deadline": "it did not come in time (verifier.named_deadline_s)",
    "silent": "its drafter had not answered yet",
    "lost": "its drafter was not connected",
    "failed": "its drafter could not make one",
}


class Switches:
    """The notes of one request, in the order in which they were made.

    Attributes:
        sources: those that were to draft for every step, whatever that costs.
        steps: how many steps these were.
        undrafted: those of them that went without, by source and reason.
    """

    __slots__ = ("_notes", "_seen", "sources", "steps", "undrafted")

    def __init__(self) -> None:
        self._notes: list[str] = []
        # The last step that went without, by source and reason.
        self._seen: dict[tuple[str, Why], int] = {}
        self.sources: tuple[str, ...] = ()
        self.steps = 0
        self.undrafted: Counter[tuple[str, Why]] = Counter()

    def note(self, generated: int, what: str) -> None:
        """Note that other sources draft from now on, and why; ``generated``: tokens of the answer so far."""
        self._notes.append(f"after {generated} tokens {what}")

    def begin_step(self, sources: Sequence[str]) -> None:
        """Note that all of these are to draft for the coming step."""
        self.sources = tuple(sources)
        self.steps += 1

    def without(self, generated: int, source: str, why: Why) -> None:
        """Note that the coming step goes without all of a source's draft. The first one is told at once."""
        if self._seen.get((source, why)) == self.steps:
            return
        self._seen[source, why] = self.steps
        self.undrafted[source, why] += 1
        if self.undrafted[source, why] == 1:
            self.note(generated, f"a step without the draft of {source}: {_WORDS[why]}")

    def without_all(self, generated: int, why: Why) -> None:
        """Note that the coming step checks no source's draft whole."""
        for source in self.sources:
            self.without(generated, source, why)

    def end(self, generated: int) -> None:
        """Note how many steps went without, once the answer is there."""
        for (source, why), count in self.undrafted.items():
            if count > 1:
                self.note(generated, f"{count} of {self.steps} steps without the draft of {source}: {_WORDS[why]}")

    def take(self) -> tuple[str, ...]:
        """What was noted since the last call."""
        if not self._notes:
            return ()
        noted, self._notes = tuple(self._notes), []
        return noted
