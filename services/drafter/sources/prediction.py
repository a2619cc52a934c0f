"""Drafts what the user predicts: a text that the answer is expected to be, or to resemble (OpenAI's Predicted Outputs).

The answer is followed through the prediction. Where it leaves the prediction, its last few tokens are searched for there.
Until they are found, one replaced token is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.drafter.config import DrafterConfig
from speculation.messages import OpenSession, StepReport

NAME = "prediction"

# Kinds of candidates: by how many of the answer's last tokens agree with the prediction; "guess": the place is assumed.
_AGREEING = (0, 1, 2, 4, 8, 16)
PRIOR = {
    "guess": 0.3,
    **{f"agree:{count}": prior for count, prior in zip(_AGREEING, (0.75, 0.6, 0.75, 0.9, 0.95, 0.97), strict=True)},
}
# The longest and the shortest end of the answer that is looked for.
_LONGEST, _SHORTEST = 4, 2

# Positions that one call indexes, in about a millisecond.
_PIECE = 1024

# A position in the prediction, the tokens before it that agree, and whether it is assumed.
Place = tuple[int, int, bool]


def make(config: DrafterConfig) -> PredictedAnswer:
    """For ``catalogue.MAKERS``."""
    return PredictedAnswer()


class PredictedAnswer:
    """Implements ``TextSource``. Nothing is kept beyond a request."""

    prior = PRIOR

    def open(self, message: OpenSession) -> PredictionSession:
        """As ``TextSource.open``."""
        return PredictionSession(message.prediction, message.tokens[message.prompt_length :])

    def forget(self, tenant: str) -> None:
        """Nothing is kept."""


class PredictionSession:
    """Implements ``PathSession``: one answer beside its prediction."""

    def __init__(self, prediction: Sequence[int], answer: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        # n-gram of the prediction -> positions right after it, earliest first. Filled a piece at a time.
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._indexed = _SHORTEST
        self.catch_up()
        self._latest: list[int] = []
        self._place: Place = (0, 0, False)
        self._take(answer)

    def start(self) -> Place | None:
        return self._place if self._place[0] < len(self._prediction) else None

    def follow(self, place: Place, token: int) -> Place | None:
        at, agreeing, _ = place
        if self._prediction[at] != token or at + 1 >= len(self._prediction):
            return None
        return at + 1, agreeing + 1, False

    def candidates(self, place: Place) -> Iterator[tuple[int, str]]:
        at, agreeing, assumed = place
        kind = max(count for count in _AGREEING if count <= agreeing)
        yield self._prediction[at], "guess" if assumed else f"agree:{kind}"

    def catch_up(self) -> bool:
        last = len(self._prediction) + 1
        for end in range(self._indexed, min(self._indexed + _PIECE, last)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._followers.setdefault(self._prediction[end - length : end], []).append(end)
        self._indexed = min(self._indexed + _PIECE, last)
        return self._indexed < last

    def observe(self, report: StepReport) -> None:
        self._take(report.committed)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at, agreeing, _ = self._place
            self._latest = [*self._latest[1 - _LONGEST :], token]
            if at < len(self._prediction) and self._prediction[at] == token:
                self._place = (at + 1, agreeing + 1, False)
            else:
                self._place = self._find(at)

    def _find(self, before: int) -> Place:
        """The place after the answer's last tokens that is nearest to the one where the answer left the prediction."""
        for length in range(min(_LONGEST, len(self._latest)), _SHORTEST - 1, -1):
            if places := self._followers.get(tuple(self._latest[-length:])):
                return min(places, key=lambda place: (abs(place - before), place)), length, False
        return before + 1, 0, True
