"""Makes DISCO's classifier for a draft model: examples from the target's text, training, theta, the cost of a draft."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from services.drafter.heads.files.head_config import FINAL
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from services.drafter.stopping.classifier import Classifier, ClassifierCard
from services.drafter.stopping.lengths import Static
from services.drafter.stopping.transfer import TransferCell
from services.model_files.folder import model_fingerprint
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from training.data_folder import weights_digest
from training.data_manifest import read_data_manifest
from training.disco import DiscoRecipe, Quality, StopChoice, choose, quality, train_classifier
from training.disco_transfer import transfer
from training.shards import Split, TrainingSequence, read_shards
from training.soft_labels import SoftLabels
from training.stop_examples import (
    Drafting,
    KnownAnswer,
    ProbedAnswer,
    StopExamples,
    chain_examples,
    judged_examples,
    probe,
)

Examples = Literal["chains", "judged"]
Labels = Literal["hard", "soft"]
# Passes that are timed, and tokens drafted in each call of the draft model.
_TIMED, _DRAFTED = 12, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoOptions:
    """What is trained.

    Attributes:
        data: folder of ``outrider train data``.
        draft, target: folders of the models.
        most: answers used of each split, the shortest prompts first.
        temperature: of the answers used.
        longest: most tokens of a draft while examples are made.
        beyond: tokens drafted behind the first wrong one.
        examples: ``chains``: with these; ``judged``: the paper's, without.
        labels: ``hard``: whether the target took the token; ``soft``: how likely one drawn from q is accepted, which needs a
            temperature above 0.
    """

    data: Path
    draft: Path
    target: Path
    most: int
    temperature: float
    longest: int
    beyond: int
    examples: Examples
    labels: Labels = "hard"
    recipe: DiscoRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeDisco:
    """A classifier, and what it would save on validation text at cost ``c``; ``quality`` of what the target judges there."""

    classifier: Classifier
    card: ClassifierCard
    choice: StopChoice
    quality: Quality
    c: float


def make_disco(
    options: DiscoOptions,
    answers: Mapping[Split, Sequence[KnownAnswer]],
    drafting: Drafting,
    source: str,
    c: float,
    advance: Callable[[], None],
) -> MadeDisco:
    """Train a classifier on answers of the training split; choose theta on the validation split.

    Args:
        drafting: the draft source under a policy, and ``source``, its name.
        c: a pass of the draft model over one of the target.
        advance: called after every answer.

    Raises:
        ConfigurationError: the answers are too few.
    """
    probed = {
        split: probe(
            drafting, source, answers[split], longest=options.longest, beyond=options.beyond, advance=advance
        )
        for split in answers
    }  # fmt: skip
    examples = chain_examples if options.examples == "chains" else judged_examples
    train, validation = examples(probed["train"]), examples(probed["validation"])
    classifier = train_classifier(train, validation, options.recipe)
    choice = choose(probed["validation"], classifier, c)
    found = quality(classifier, _as_judged(probed["validation"]), choice.theta)
    card = ClassifierCard(
        draft=model_fingerprint(options.draft),
        target=model_fingerprint(options.target),
        theta=choice.theta,
        max_tokens=choice.max_tokens,
        training={
            "answers": {split: len(answers[split]) for split in answers},
            "temperature": options.temperature,
            "examples": options.examples,
            "labels": options.labels,
            "train_examples": len(train.labels),
            "steps": options.recipe.steps,
            "cost_ratio": round(c, 4),
            "f1": round(found.f1, 4),
            "auc": round(found.auc, 4),
        },
    )
    return MadeDisco(classifier=classifier, card=card, choice=choice, quality=found, c=c)


def _as_judged(answers: Sequence[ProbedAnswer]) -> StopExamples:
    """What the target judged there, with its verdicts."""
    return judged_examples([replace(answer, soft=None) for answer in answers])


def check_labels(labels: Labels, temperature: float) -> None:
    """Raises:
    ConfigurationError: soft labels are wanted where a token is right or wrong.
    """
    if labels == "soft" and temperature <= 0:
        raise ConfigurationError(
            field="--labels", value=f"soft at --temperature {temperature:g}", allowed="above 0; or use hard"
        )


def known_answers(options: DiscoOptions, soft: SoftLabels | None = None) -> dict[Split, list[KnownAnswer]]:
    """The answers used of each split.

    Args:
        soft: makes their labels; None: the target's verdicts.

    Raises:
        ConfigurationError: the data were made by another target, or hold too few answers.
    """
    manifest = read_data_manifest(options.data)
    if manifest.target.weights_sha256 != weights_digest(options.target):
        raise ConfigurationError(
            f"the data in {options.data} were written by another target ({manifest.target.name}): name it with --model",
            about=options.data,
        )
    found: dict[Split, list[KnownAnswer]] = {}
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        every = [
            each for each in read_shards(options.data, split, layers=(FINAL,)) if each.temperature == options.temperature
        ]
        if not every:
            raise ConfigurationError(
                f"the {split} split of {options.data} holds no answer at temperature {options.temperature:g}: "
                "make more data",
                about=options.data,
            )
        # Reading prompts is most of the work; their length says little about where drafts fail.
        every = sorted(every, key=lambda each: each.prompt_length)[: options.most]
        found[split] = [_known(each, soft) for each in every]
    return found


def transfer_cells(
    options: DiscoOptions, drafting: Drafting, source: str, c: float, advance: Callable[[], None]
) -> list[TransferCell]:
    """Classifiers of each kind of prompts on each other; both splits of the data are used, ``most`` answers of each kind.

    Args:
        drafting, source, c, advance: as ``make_disco``'s.

    Raises:
        ConfigurationError: as ``transfer``.
    """
    splits: tuple[Split, ...] = ("train", "validation")
    every = [each for split in splits for each in read_shards(options.data, split, layers=(FINAL,))]
    kinds: dict[str, list[KnownAnswer]] = {}
    for each in sorted(every, key=lambda each: each.prompt_length):
        if each.temperature == options.temperature and len(kinds.setdefault(each.domain, [])) < options.most:
            kinds[each.domain].append(_known(each, None))
    probed = {
        kind: probe(drafting, source, known, longest=options.longest, beyond=options.beyond, advance=advance)
        for kind, known in kinds.items()
    }  # fmt: skip
    return transfer(probed, options.recipe, c)


def _known(sequence: TrainingSequence, soft: SoftLabels | None) -> KnownAnswer:
    prompt, answer = (
        tuple(part.tolist()) for part in np.split(sequence.tokens, [sequence.prompt_length])
    )  # fmt: skip
    # Position p's state is what the token at p + 1 was chosen from.
    states = sequence.states[sequence.prompt_length - 1 : -1]
    return KnownAnswer(
        prompt=prompt,
        answer=answer,
        temperature=sequence.temperature,
        soft=None if soft is None else soft.along(prompt, answer, states),
    )


def measured_cost(target: TargetConfig, drafting: Drafting, source: str, answers: Sequence[KnownAnswer]) -> float:
    """c: a pass of the draft model over a pass of the target, one row each, behind the same text on this machine."""
    text = max(answers, key=lambda each: len(each.answer))
    tokens = (*text.prompt, *text.answer)
    return _draft_pass_s(drafting, source, text) / _target_pass_s(target, tokens)


def _draft_pass_s(drafting: Drafting, source: str, text: KnownAnswer) -> float:
    drafts = drafting(Static(_DRAFTED))
    opening = OpenSession(
        session_id="cost", tokens=(*text.prompt, *text.answer), prompt_length=len(text.prompt), sources=(source,),
        max_nodes=_DRAFTED,
    )  # fmt: skip
    session = drafts.open(opening)
    wanted = [DraftWanted(session=session, max_nodes=_DRAFTED, states=KnownStates())]
    times: list[float] = []
    # The first calls read the text.
    while len(times) < _TIMED:
        start = time.perf_counter()
        drafted = len(drafts.draft(wanted)[0] or ())
        if drafted:
            times.append((time.perf_counter() - start) / drafted)
    session.close()
    return statistics.median(times[1:])


def _target_pass_s(config: TargetConfig, tokens: tuple[int, ...]) -> float:
    target = TransformersTarget(config)
    try:
        target.open("cost", len(tokens) + 1)
        for begin in range(0, len(tokens), 256):
            part = tokens[begin : begin + 256]
            target.forward([Rows(request_id="cost", context=begin, tokens=part, logits=0)])
            target.keep("cost", begin, range(len(part)))
        times: list[float] = []
        for _ in range(_TIMED):
            start = time.perf_counter()
            target.forward([Rows(request_id="cost", context=len(tokens), tokens=(1,), logits=1)])
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])
    finally:
        target.shutdown()
