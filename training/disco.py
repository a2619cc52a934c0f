"""DISCO's classifier (arXiv 2405.04304): trains it on a draft model's examples, and chooses when it ends a draft.

The paper's loss, "cross-entropy with the total variance distance", is read as binary cross-entropy with the verdicts.
Width, activation, optimiser and epochs are not given there; these are ours. theta and the most tokens are those that cost
least on validation text, if a pass of the draft model costs c passes of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from services.drafter.stopping.classifier import CLIP, FEATURES, Classifier
from speculation.errors import ConfigurationError
from training.stop_examples import ProbedAnswer, ProbedChain, StopExamples

THETAS = tuple(round(0.05 * step, 2) for step in range(1, 20))
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
_STEP = FEATURES.index("draft_index")
_FEWEST = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoRecipe:
    """How the classifier is trained: full batches, Adam, the weights with the least loss on validation examples."""

    hidden: int = 32
    steps: int = 600
    learning_rate: float = 0.01
    weight_decay: float = 1e-4
    seed: int = 0


def train_classifier(train: StopExamples, validation: StopExamples, recipe: DiscoRecipe) -> Classifier:
    """Train on ``train``; keep what does best on ``validation``.

    Raises:
        ConfigurationError: there are too few examples, or all have one label.
    """
    _check(train, "train")
    _check(validation, "validation")
    mean = train.features.mean(axis=0)
    # An input that never changes tells nothing, and must not be divided by 0.
    std = np.where(train.features.std(axis=0) > 1e-6, train.features.std(axis=0), 1).astype(np.float32)
    x, y, x_valid, y_valid = (
        torch.from_numpy(each)
        for each in (
            _standardised(train, mean, std), train.labels, _standardised(validation, mean, std), validation.labels
        )
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = nn.Sequential(nn.Linear(len(FEATURES), recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, 1))
    optimiser = torch.optim.Adam(net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.steps)
    best, kept = float("inf"), [parameter.detach().clone() for parameter in net.parameters()]
    for _ in range(recipe.steps):
        optimiser.zero_grad()
        functional.binary_cross_entropy_with_logits(net(x)[:, 0], y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            loss = float(functional.binary_cross_entropy_with_logits(net(x_valid)[:, 0], y_valid))
        if loss < best:
            best, kept = loss, [parameter.detach().clone() for parameter in net.parameters()]
    w1, b1, w2, b2 = (each.numpy() for each in kept)
    return Classifier(w1=w1, b1=b1, w2=w2[0].copy(), b2=b2, mean=mean, std=std)


def _standardised(examples: StopExamples, mean: NDArray[np.float32], std: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.clip((examples.features - mean) / std, -CLIP, CLIP), dtype=np.float32)


def _check(examples: StopExamples, name: str) -> None:
    if len(examples.labels) < _FEWEST:
        raise ConfigurationError(
            f"the {name} split has {len(examples.labels)} examples: {_FEWEST} are needed; make more data",
            about=f"the {name} split",
        )
    if examples.labels.min() == examples.labels.max():
        raise ConfigurationError(
            f"in the {name} split the draft model is {'right' if examples.labels[0] else 'wrong'} everywhere: "
            "there is nothing to learn about where to stop",
            about=f"the {name} split",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How well C tells tokens apart that will be accepted: F1 of C >= theta, and the area under the ROC curve."""

    f1: float
    auc: float


def quality(classifier: Classifier, examples: StopExamples, theta: float) -> Quality:
    """Of a classifier on examples with labels 0 and 1."""
    c, accepted = classifier.confidence(examples.features), examples.labels > 0.5
    said = c >= theta
    right = int((said & accepted).sum())
    good, bad = np.sort(c[accepted]), c[~accepted]
    below, up_to = np.searchsorted(good, bad, "left"), np.searchsorted(good, bad, "right")
    return Quality(
        f1=2 * right / max(1, int(said.sum()) + int(accepted.sum())),
        auc=float(1 - (below + up_to).sum() / (2 * max(1, len(good) * len(bad)))),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What a policy would need for some answers."""

    tokens: int = 0
    target: int = 0
    draft: int = 0

    def cost(self, c: float) -> float:
        """In passes of the target, per token."""
        return (self.target + c * self.draft) / self.tokens

    def __add__(self, other: Passes) -> Passes:
        return Passes(tokens=self.tokens + other.tokens, target=self.target + other.target, draft=self.draft + other.draft)


class Places:
    """An answer's positions: how many drafted tokens are right at each, and what the classifier would say along its draft.

    Attributes:
        right: [length]: tokens that would be accepted.
        confidences: [length, most]: C of each token of a draft from there. Where a draft was not probed so far, 1: it is
            assumed to go on.
    """

    def __init__(self, answer: ProbedAnswer, classifier: Classifier | None, most: int) -> None:
        self.length = answer.length
        self.right = np.zeros(answer.length, dtype=np.int64)
        self.confidences = np.ones((answer.length, most), dtype=np.float32)
        for chain in answer.chains:
            # From the last token of a chain that was never wrong on, nothing is known.
            for within in range(min(chain.right + 1, len(chain.features))):
                place = chain.position + within
                self.right[place] = chain.right - within
                if classifier is not None:
                    said = _said(classifier, chain, within, most)
                    self.confidences[place, : len(said)] = said

    def passes(self, length_at: Callable[[int], int]) -> Passes:
        """Decode the answer by drafts of these lengths."""
        at, target, draft = 1, 0, 0
        while at < self.length:
            drafted = min(length_at(at), self.length - at - 1)
            at += min(drafted, int(self.right[at])) + 1
            target += 1
            draft += drafted
        return Passes(tokens=self.length - 1, target=target, draft=draft)

    def classified(self, theta: float, most: int) -> Passes:
        """Decode the answer by drafts that end behind the first token with C < theta."""
        below = self.confidences[:, :most] < theta
        lengths = np.where(below.any(axis=1), below.argmax(axis=1) + 1, most)
        return self.passes(lambda at: int(lengths[at]))


def _said(classifier: Classifier, chain: ProbedChain, within: int, most: int) -> NDArray[np.float32]:
    """C of the tokens of a draft that begins in the middle of another: only the index in the draft is another."""
    features = chain.features[within : within + most].copy()
    features[:, _STEP] = np.arange(len(features))
    return classifier.confidence(features)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopChoice:
    """The cheapest way to stop, and what it is compared with, on the same answers.

    Attributes:
        static: the best static length.
    """

    theta: float
    max_tokens: int
    disco: Passes
    static: int
    static_passes: Passes
    oracle: Passes


def choose(answers: Sequence[ProbedAnswer], classifier: Classifier, c: float) -> StopChoice:
    """The theta and most tokens that cost least on these answers, if a draft pass costs ``c`` passes of the target."""
    places = [Places(answer, classifier, max(LENGTHS)) for answer in answers]
    disco = {(theta, most): _all(place.classified(theta, most) for place in places) for theta in THETAS for most in LENGTHS}
    static = {length: _all(place.passes(lambda _, length=length: length) for place in places) for length in LENGTHS}  # type: ignore[misc]
    theta, most = min(disco, key=lambda pair: disco[pair].cost(c))
    length = min(static, key=lambda each: static[each].cost(c))
    return StopChoice(
        theta=theta,
        max_tokens=most,
        disco=disco[theta, most],
        static=length,
        static_passes=static[length],
        oracle=_all(place.passes(lambda at, place=place: int(place.right[at])) for place in places),  # type: ignore[misc]
    )


def classified_passes(answers: Sequence[ProbedAnswer], classifier: Classifier, choice: StopChoice) -> Passes:
    """What answers would need if the classifier ended drafts as it was chosen."""
    places = [Places(answer, classifier, max(LENGTHS)) for answer in answers]
    return _all(place.classified(choice.theta, choice.max_tokens) for place in places)


def _all(several: Iterable[Passes]) -> Passes:
    return sum(several, Passes())
