"""Settings of private answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from services.settings import Setting

# Bytes of an event for each of its tokens: more than the text of one, its id, and its share of the event's frame.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """How private answers are sent (``EvenRouter``)."""

    mode: Annotated[
        Literal["none", "strict"],
        Setting(
            "strict: all answers are streamed at an even pace, and nothing is drafted for them from others' texts; none: "
            "those that ask for it",
            name="privacy",
        ),
    ] = "none"
    tokens: Annotated[int, Setting("tokens in each event of a private answer", name="privacy_tokens", ge=1, le=1024)] = 16
    # Only at a pace that plain decoding keeps does no event come later than its time, whatever was drafted.
    interval_s: Annotated[
        float,
        Setting(
            "seconds from one event of a private answer to the next: longer than plain decoding takes for privacy_tokens",
            name="privacy_interval_s",
            gt=0,
            le=60,
        ),
    ] = 1.0

    @property
    def strict(self) -> bool:
        """Whether all answers are private; else those that ask for it."""
        return self.mode == "strict"

    def padding(self, private: bool | None) -> int | None:
        """Bytes of which every event of an answer is a multiple; None: the answer is not private."""
        return _BYTES_PER_TOKEN * max(16, self.tokens) if self.strict or private else None
