"""Stops after a token that the draft model itself finds unlikely, as Hugging Face's ``ConfidenceCriteria`` does.

The threshold is fitted again after every step, as in ``AssistedCandidateGenerator.update_candidate_strategy``: it becomes
the one with the least fpr + 3 * fnr on the tokens judged so far. A false positive is a rejected token that was thought good,
a wasted draft; a false negative is an accepted one that was not, and costs a pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.drafter.stopping.interface import DraftedToken
from speculation.messages import OpenSession

# Fitted on the latest so many tokens, so that a long answer costs no more than a short one.
_KEPT = 1024
_FEWEST = 6
_MISSED = 3


class Confidence:
    """Implements ``StopPolicy``.

    Args:
        length: most tokens of a draft.
        threshold: of every request's first draft; 0: never stops, and is never fitted.
    """

    reads_distribution = False

    def __init__(self, length: int, threshold: float) -> None:
        self._length = length
        self._threshold = threshold

    def open(self, message: OpenSession) -> ConfidenceState:
        return ConfidenceState(self._length, self._threshold)


class ConfidenceState:
    """Implements ``StopState``.

    Attributes:
        threshold: as fitted last.
    """

    def __init__(self, length: int, threshold: float) -> None:
        self.threshold = threshold
        self._length = length
        self._fits = threshold > 0
        self._draft: list[float] = []
        self._probabilities: list[float] = []
        self._matched: list[bool] = []

    def begin(self, position: int) -> int:
        self._draft.clear()
        return self._length

    def more(self, drafted: DraftedToken) -> bool:
        self._draft.append(drafted.probability)
        return drafted.probability >= self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        # Tokens behind the first rejected one were never judged.
        judged = self._draft[: min(drafted, accepted + 1)]
        self._probabilities += judged
        self._matched += [index < accepted for index in range(len(judged))]
        del self._probabilities[:-_KEPT], self._matched[:-_KEPT]
        if self._fits and len(judged) and len(self._matched) >= _FEWEST and 0 < sum(self._matched) < len(self._matched):
            self.threshold = best_threshold(self._probabilities, self._matched)


def best_threshold(probabilities: Sequence[float], matched: Sequence[bool]) -> float:
    """The threshold with the least fpr + 3 * fnr if tokens of at least this probability are taken; the highest of several.

    Args:
        probabilities, matched: [n]; at least one token matched and one did not.
    """
    order = np.argsort(-np.asarray(probabilities), kind="stable")
    values, hits = np.asarray(probabilities, dtype=np.float64)[order], np.asarray(matched, dtype=np.int64)[order]
    taken_right, taken_wrong = np.cumsum(hits), np.cumsum(1 - hits)
    right, wrong = int(taken_right[-1]), int(taken_wrong[-1])
    # Times the number of right ones and that of wrong ones: whole numbers, so that equal costs compare as equal.
    cost = taken_wrong * right + _MISSED * wrong * (right - taken_right)
    # Equal probabilities are taken together, so only the last of them is a threshold.
    cost[:-1][values[:-1] == values[1:]] = np.iinfo(np.int64).max
    return float(values[np.argmin(cost)])
