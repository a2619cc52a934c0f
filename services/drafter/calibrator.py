"""From kinds of candidates to probabilities that the target takes them, learnt online.

At every node the sources name candidates, each with its kind. Exactly one token comes next, a candidate or none of them: a
choice among rivals, so the model is the conditional logit (McFadden 1974)::

    P(token) = exp(sum of its kinds' weights) / (1 + sum over all candidates)

Two sources that name the same token add their weights, and one weight more that says what their agreement is worth. Wherever
the text has gone on along a node's path, the outcome is known for every candidate there, checked or not; so all are learnt
from. A kind's weight begins at the odds that its source believes in.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from speculation.files import write_whole

log = logging.getLogger(__name__)

# A token and the kinds under which sources named it.
Candidate = tuple[int, tuple[str, ...]]

# Step of a weight, shrinking with what it has learnt (AdaGrad), but not below a floor: what is right drifts with the text.
_STEP = 0.5
_SLOWEST = 0.01
_LARGEST = 12.0
_UNKNOWN_KIND = 0.05
_AGREEMENT = 0.8
_VERSION = 1


class Calibrator:
    """Weights of kinds. They hold no text, and are shared by all requests."""

    def __init__(self, prior: Mapping[str, float]) -> None:
        self._weights = {kind: _logit(probability) for kind, probability in prior.items()}
        self._squares: dict[str, float] = {}

    def probabilities(self, candidates: Sequence[Candidate]) -> list[float]:
        """Of each candidate, that it comes next."""
        odds = [math.exp(self._score(kinds)) for _, kinds in candidates]
        whole = 1.0 + sum(odds)
        return [each / whole for each in odds]

    def learn(self, candidates: Sequence[Candidate], token: int) -> None:
        """Of these, or of all others, ``token`` came next."""
        for (candidate, kinds), probability in zip(candidates, self.probabilities(candidates), strict=True):
            error = (candidate == token) - probability
            for kind in _with_agreement(kinds):
                square = self._squares.get(kind, 1.0) + error * error
                self._squares[kind] = square
                step = max(_SLOWEST, _STEP / math.sqrt(square))
                weight = self._weight(kind) + step * error
                self._weights[kind] = min(_LARGEST, max(-_LARGEST, weight))

    def save(self, path: Path) -> None:
        """Write the weights, whole or not at all. That it fails costs only what was learnt.

        Where another drafter has written, each kind stays with the one that has learnt more of it.
        """
        entries = self._read(path) if path.exists() else {}
        for kind, square in self._squares.items():
            if square >= entries.get(kind, (0.0, 0.0))[1]:
                entries[kind] = (round(self._weights[kind], 4), round(square, 4))
        content = {"version": _VERSION, "weights": entries}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(content, indent=0, sort_keys=True).encode())
        except OSError as error:
            log.warning("cannot save what sources are worth to %s: %s", path, error)

    def load(self, path: Path) -> bool:
        """Take over what was saved; whether there was anything usable. A file that is none is told of and left alone."""
        entries = self._read(path) if path.exists() else {}
        for kind, (weight, square) in entries.items():
            self._weights[kind], self._squares[kind] = weight, square
        return bool(entries)

    def _read(self, path: Path) -> dict[str, tuple[float, float]]:
        """Weights and squares by kind; none where the file is none of ours."""
        try:
            content = json.loads(path.read_text())
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            entries = {kind: (float(weight), float(square)) for kind, (weight, square) in content["weights"].items()}
            for kind, (weight, square) in entries.items():
                if not (abs(weight) <= _LARGEST and 1 <= square < math.inf):
                    raise ValueError(f"{kind}: {weight}, {square}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s is no file of weights (%s): sources are judged anew", path, error)
            return {}
        return entries

    def _score(self, kinds: tuple[str, ...]) -> float:
        if len(kinds) == 1:
            return self._weight(kinds[0])
        return sum(map(self._weight, _with_agreement(kinds)))

    def _weight(self, kind: str) -> float:
        weight = self._weights.get(kind)
        return _first_weight(kind) if weight is None else weight


# Asked at every node, for a few thousand combinations at most.
@functools.lru_cache(maxsize=1 << 16)
def _with_agreement(kinds: tuple[str, ...]) -> tuple[str, ...]:
    if len(kinds) == 1:
        return kinds
    # How much more two say than one depends on who they are and how they see it, roughly.
    return (*kinds, "+".join(kind.rpartition(":")[0] for kind in kinds))


def _first_weight(kind: str) -> float:
    return _AGREEMENT if "+" in kind else _logit(_UNKNOWN_KIND)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
