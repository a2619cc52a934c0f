"""DISCO (arXiv 2405.04304): a small classifier says after each drafted token whether the target will accept it.

    C = sigmoid(w2 . relu(w1 x + b1) + b2)
    x = [10 largest draft probabilities, entropy, index in the draft, index in the answer]

The draft ends when C < theta, or at the most tokens. The paper's position is the index in the draft in section 3,
and the one in the answer in appendix D; both are inputs here. ``training/disco.py`` makes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from services.drafter.stopping.interface import TOP, DraftedToken
from services.model_files.folder import read_json, reading
from speculation.errors import ConfigurationError
from speculation.files import write_whole
from speculation.messages import OpenSession

FEATURES = (*(f"probability_{rank}" for rank in range(1, TOP + 1)), "entropy", "draft_index", "answer_index")
# Inputs are cut off at so many standard deviations: answers may be longer than any in training.
CLIP = 4.0
_ENTROPY, _STEP, _POSITION = TOP, TOP + 1, TOP + 2
_OF = "classifier for stop_policy: disco"

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierCard:
    """What a classifier was made for, and how it is used.

    Attributes:
        draft, target: ``services.model_files.folder.model_fingerprint`` of the models that it was trained on.
        theta: a draft ends after a token with a smaller C.
        max_tokens: most tokens of a draft (the paper's SL_max).
        features: ``FEATURES`` at the time.
        training: data, steps and evaluation, for people.
    """

    draft: str
    target: str
    theta: float
    max_tokens: int
    features: tuple[str, ...] = FEATURES
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Classifier:
    """Weights, float32.

    Attributes:
        w1, b1: [hidden, 13], [hidden].
        w2, b2: [hidden], [1].
        mean, std: [13]: inputs are standardised with them.
    """

    w1: Array
    b1: Array
    w2: Array
    b2: Array
    mean: Array
    std: Array

    def confidence(self, features: Array) -> Array:
        """C of every row.

        Args:
            features: [n, 13].
        """
        x = np.clip((features - self.mean) / self.std, -CLIP, CLIP)
        logits = np.maximum(x @ self.w1.T + self.b1, 0) @ self.w2 + self.b2
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -60, 60))), dtype=np.float32)

    def write(self, file: Path, card: ClassifierCard) -> None:
        """Write ``file`` (.safetensors), and its card beside it (.json)."""
        write_whole(file.with_suffix(".json"), (json.dumps(asdict(card), indent=1) + "\n").encode())
        write_whole(file, save(asdict(self)))


def read_classifier(file: Path) -> tuple[Classifier, ClassifierCard]:
    """A classifier and its card.

    Raises:
        ConfigurationError: a file is missing, damaged or of another version; names it.
    """
    about = read_json(file.with_suffix(".json"), _OF)
    with reading(f"load the {_OF} at {file}", about=file):
        card = ClassifierCard(
            draft=str(about.pop("draft")),
            target=str(about.pop("target")),
            theta=float(about.pop("theta")),
            max_tokens=int(about.pop("max_tokens")),
            features=tuple(about.pop("features")),
            training=dict(about.pop("training")),
        )
        if about:
            raise ValueError(f"{min(about)} is not known")
        tensors = load(file.read_bytes())
        classifier = Classifier(**tensors)
    faults = _faults(card, tensors)
    if faults:
        raise ConfigurationError(f"cannot load the {_OF} at {file}: {faults[0]}; train it anew", about=file)
    return classifier, card


def _faults(card: ClassifierCard, tensors: Mapping[str, NDArray[Any]]) -> list[str]:
    width, hidden = len(FEATURES), tensors["b1"].size
    shapes = {"w1": (hidden, width), "b1": (hidden,), "w2": (hidden,), "b2": (1,), "mean": (width,), "std": (width,)}
    found = {name: (str(each.dtype), each.shape) for name, each in tensors.items()}
    faults = [
        f"{name} is {found[name][0]}{list(found[name][1])}, must be float32{list(shape)}"
        for name, shape in shapes.items()
        if found[name] != ("float32", shape)
    ]
    faults += [f"{name} holds a number that is not finite" for name, each in tensors.items() if not np.isfinite(each).all()]
    if not (tensors["std"] > 0).all():
        faults.append("std holds a number that is not above 0")
    if card.features != FEATURES:
        faults.append(f"its inputs are {', '.join(map(str, card.features))}")
    if not (0 <= card.theta <= 1 and card.max_tokens >= 1):
        faults.append(f"theta is {card.theta}, max_tokens {card.max_tokens}")
    return faults


def check_models(card: ClassifierCard, file: Path, draft: str, target: str) -> None:
    """Check that a classifier was trained on these models.

    Args:
        draft, target: their ``model_fingerprint``.

    Raises:
        ConfigurationError: it was trained on others; says which.
    """
    for name, own, served in (("draft model", card.draft, draft), ("target", card.target, target)):
        if own != served:
            raise ConfigurationError(
                f"cannot use the {_OF} at {file}: it was trained on another {name} ({own[:12]}, this one is {served[:12]}); "
                "make one with `outrider train disco`",
                about=file,
            )


def features_of(top: Sequence[float], entropy: float, step: int, position: int) -> Array:
    """The inputs for one token, [13]. A vocabulary below ``TOP`` tokens is filled up with zeros."""
    x = np.zeros(len(FEATURES), dtype=np.float32)
    x[: len(top)] = top
    x[_ENTROPY], x[_STEP], x[_POSITION] = entropy, step, position
    return x


class Disco:
    """Implements ``StopPolicy``."""

    reads_distribution = True

    def __init__(self, classifier: Classifier, theta: float, max_tokens: int) -> None:
        self._classifier = classifier
        self._theta = theta
        self._max = max_tokens

    def with_theta(self, theta: float) -> Disco:
        """The same classifier with another threshold."""
        return Disco(self._classifier, theta, self._max)

    def open(self, message: OpenSession) -> Disco:
        # Nothing is remembered, so all requests share one state.
        return self

    def begin(self, position: int) -> int:
        return self._max

    def more(self, drafted: DraftedToken) -> bool:
        return self.confidence(drafted) >= self._theta

    def confidence(self, drafted: DraftedToken) -> float:
        """C of one token."""
        x = features_of(drafted.top, drafted.entropy, drafted.step, drafted.position)
        return float(self._classifier.confidence(x[None])[0])

    def observe(self, drafted: int, accepted: int) -> None:
        """It does not learn while it serves."""
