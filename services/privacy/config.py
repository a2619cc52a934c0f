"""Settings of private answers."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of an event for each of its tokens: more than the text of one, its id, and its share of the event's frame.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """How private answers are sent (``EvenRouter``).

    Attributes:
        strict: all answers are private; else those that ask for it.
        tokens: in each event.
        interval_s: seconds from one event to the next. Plain decoding should give ``tokens`` in this time: only then does no
            event come later than its time, whatever was drafted.
    """

    strict: bool = False
    tokens: int = 16
    interval_s: float = 1.0

    def padding(self, private: bool | None) -> int | None:
        """Bytes of which every event of an answer is a multiple; None: the answer is not private."""
        return _BYTES_PER_TOKEN * max(16, self.tokens) if self.strict or private else None
