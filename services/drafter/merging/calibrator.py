"""Turns the kinds of candidates into probabilities that the target takes them, learnt online.

At every node the sources name candidates, each with its kind. Exactly one token comes next, one of the candidates or some
other. The model of such a choice is the conditional logit (McFadden 1974)::

    P(token) = exp(sum of its kinds' weights) / (1 + sum over all candidates)

If several sources name the same token, the first one's weight counts, and one more for their agreement. They read the same
text, so the weights of all would count the same evidence several times: where one of two phrases follows, both sources say
so. What a model computes is evidence of its own, and its weight is added. Once the text has passed a node, the outcome is
known for every candidate there, checked or not; so all of them are learnt from. A kind's weight begins at the odds that its
source claims.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

from speculation.files import write_whole

log = logging.getLogger(__name__)

# A token and the kinds under which sources named it.
Candidate = tuple[int, tuple[str, ...]]

# Step of a weight, in logits per unit of error: it shrinks with what was learnt (AdaGrad), but not below a floor, since the
# right weight drifts with the text.
_STEP, _SLOWEST = 0.5, 0.01
# Largest weight, in logits: probabilities stay away from 0 and 1, so a kind can recover.
_LARGEST = 12.0
# Before anything is known: the probability of a kind without a claim, and the weight of an agreement, in logits.
_UNKNOWN_KIND, _AGREEMENT = 0.05, 0.8
_VERSION = 3


class Calibrator:
    """Weights of kinds, in logits. They hold no text, and all requests share them.

    A kind alone would be a ``Ratio`` (``speculation.estimators``), as in ``AcceptanceRates``. Candidates here compete for
    one token and have several kinds, so all of their weights are corrected by one error.

    Args:
        prior: the probability that a candidate of each kind comes next, as its source claims.
        models: the sources among them that run a model.
    """

    def __init__(self, prior: Mapping[str, float], models: Collection[str] = ()) -> None:
        self._models = frozenset(models)
        self._weights: MutableMapping[str, float] = _Weights(
            {kind: _logit(probability) for kind, probability in prior.items()}
        )
        # Sums of squared errors of the kinds that something was learnt about; of others it is 1.
        self._squares: MutableMapping[str, float] = {}

    def probabilities(self, candidates: Sequence[Candidate]) -> list[float]:
        """The probability of each candidate to come next."""
        # Asked at every node of every draft.
        weights, models, exp = self._weights, self._models, math.exp
        odds: list[float] = []
        # Added one by one: some versions of Python correct the rounding of ``sum``, and the compiled form does not.
        whole = 1.0
        for _, kinds in candidates:
            if len(kinds) == 1:
                score = weights[kinds[0]]
            else:
                score = 0.0
                for kind in _counting(kinds, models):
                    score += weights[kind]
            odds.append(exp(score))
            whole += odds[-1]
        return [each / whole for each in odds]

    def learn(self, candidates: Sequence[Candidate], token: int) -> None:
        """Learn that ``token`` came next; it may be none of the candidates."""
        weights, squares, models = self._weights, self._squares, self._models
        for (candidate, kinds), probability in zip(candidates, self.probabilities(candidates), strict=True):
            error = (candidate == token) - probability
            for kind in kinds if len(kinds) == 1 else _counting(kinds, models):
                square = squares.get(kind, 1.0) + error * error
                squares[kind] = square
                step = max(_SLOWEST, _STEP / math.sqrt(square))
                weights[kind] = min(_LARGEST, max(-_LARGEST, weights[kind] + step * error))

    def begin_with(self, other: Calibrator) -> None:
        """Take over weights as first guesses, which are corrected as fast as those of a calibrator that knows nothing."""
        self._weights.update(other._weights)

    def save(self, path: Path) -> None:
        """Write the weights atomically. A failure is logged, and costs only what was learnt.

        If another drafter has written the file, each kind keeps the weight of the drafter that has learnt more about it.
        """
        try:
            entries = self._read(path)
            for kind, square in self._squares.items():
                if square >= entries.get(kind, (0.0, 0.0))[1]:
                    entries[kind] = (round(self._weights[kind], 4), round(square, 4))
            content = {"version": _VERSION, "weights": entries}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(content, indent=0, sort_keys=True).encode())
        except OSError as error:
            log.warning("cannot save the calibration to %s: %s", path, error)

    def load(self, path: Path) -> bool:
        """Take over saved weights; returns whether there were any. An unusable file is logged and left as it is."""
        try:
            entries = self._read(path)
        except OSError as error:
            log.warning("%s cannot be read (%s): sources start from their priors", path, error)
            return False
        for kind, (weight, square) in entries.items():
            self._weights[kind], self._squares[kind] = weight, square
        return bool(entries)

    def _read(self, path: Path) -> dict[str, tuple[float, float]]:
        """Weights and squares by kind; empty if there is no file, or it is not one of ours.

        Raises:
            OSError: it cannot be read.
        """
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return {}
        try:
            content = json.loads(text)
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            entries = {kind: (float(weight), float(square)) for kind, (weight, square) in content["weights"].items()}
            for kind, (weight, square) in entries.items():
                if not (abs(weight) <= _LARGEST and 1 <= square < math.inf):
                    raise ValueError(f"{kind}: {weight}, {square}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s is no usable calibration (%s): sources start from their priors", path, error)
            return {}
        return entries


class _Weights(dict[str, float]):
    """Weights by kind; a kind that nothing was learnt about has its first one."""

    def __missing__(self, kind: str) -> float:
        return first_weight(kind)


# Asked at every node, for a few thousand combinations at most.
@functools.lru_cache(maxsize=1 << 16)
def _counting(kinds: tuple[str, ...], models: frozenset[str]) -> tuple[str, ...]:
    """The kinds whose weights count for a candidate."""
    if len(kinds) == 1:
        return kinds
    own = tuple(kind for kind in kinds[1:] if kind.partition(":")[0] in models)
    # The value of an agreement depends roughly on the kinds that agree; their last part is left out.
    return (kinds[0], *own, "+".join(kind.rpartition(":")[0] for kind in kinds))


def first_weight(kind: str) -> float:
    """The weight of a kind that nothing claims or has learnt anything about."""
    return _AGREEMENT if "+" in kind else _logit(_UNKNOWN_KIND)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
