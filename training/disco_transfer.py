"""How DISCO's classifier transfers: one trained on each kind of prompts, tried on every other kind.

The paper serves HumanEval with the classifier that it trained on MBPP. Here every kind is tried on every other: of the
answers to each kind's prompts two thirds train a classifier and choose its threshold, and the others measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.drafter.stopping.classifier import Classifier
from services.drafter.stopping.transfer import TransferCell
from speculation.errors import ConfigurationError
from training.disco import DiscoRecipe, StopChoice, choose, classified_passes, quality, train_classifier
from training.stop_examples import ProbedAnswer, chain_examples, judged_examples

# Of a kind's answers, every third one measures; of the others, every sixth one says when training is best.
_MEASURES, _VALIDATES = 3, 6


def transfer(answers: Mapping[str, Sequence[ProbedAnswer]], recipe: DiscoRecipe, c: float) -> list[TransferCell]:
    """Train on each kind, and measure on all.

    Args:
        answers: by kind of prompts.
        c: a pass of the draft model over one of the target.

    Raises:
        ConfigurationError: there are fewer than two kinds, or a kind has too few answers.
    """
    if len(answers) < 2:
        raise ConfigurationError(
            "make data of prompts in two files or more: a file's name is their kind",
            field="--transfer", verb="", value=f"has {len(answers)} kind of prompts",
        )  # fmt: skip
    trained = {kind: _trained(kind, each, recipe, c) for kind, each in answers.items()}
    return [
        _cell(kind, classifier, choice, other, [*each[::_MEASURES]], c)
        for kind, (classifier, choice) in trained.items()
        for other, each in answers.items()
    ]


def _trained(kind: str, answers: Sequence[ProbedAnswer], recipe: DiscoRecipe, c: float) -> tuple[Classifier, StopChoice]:
    seen = [each for at, each in enumerate(answers) if at % _MEASURES]
    validation = seen[::_VALIDATES]
    train = [each for at, each in enumerate(seen) if at % _VALIDATES]
    try:
        classifier = train_classifier(chain_examples(train), chain_examples(validation), recipe)
    except ConfigurationError as error:
        raise ConfigurationError(f"{kind}: {error}", about=f"the kind {kind}") from None
    return classifier, choose(seen, classifier, c)


def _cell(
    kind: str, classifier: Classifier, choice: StopChoice, other: str, answers: Sequence[ProbedAnswer], c: float
) -> TransferCell:
    judged = judged_examples([replace(answer, soft=None) for answer in answers])
    found = quality(classifier, judged, choice.theta)
    passes = classified_passes(answers, classifier, choice)
    return TransferCell(trained=kind, measured=other, f1=found.f1, auc=found.auc, speed=1 / passes.cost(c))
