"""DISCO's classifier: its examples, its training, and the choice of when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from services.drafter.stopping.classifier import FEATURES, Classifier, ClassifierCard, read_classifier
from services.drafter.stopping.interface import StopPolicy
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.unit.benchmarks.test_bench_stopping import KnowsTheText
from training.disco import (
    LENGTHS,
    DiscoRecipe,
    Passes,
    Places,
    choose,
    quality,
    train_classifier,
)
from training.disco_transfer import transfer
from training.stop_examples import (
    KnownAnswer,
    ProbedAnswer,
    ProbedChain,
    StopExamples,
    chain_examples,
    judged_examples,
    probe,
)

STEP, POSITION = FEATURES.index("draft_index"), FEATURES.index("answer_index")


def texts(count: int, length: int = 30) -> list[KnownAnswer]:
    random = np.random.default_rng(0)
    return [KnownAnswer(prompt=(n, 1), answer=tuple(random.integers(0, 16, length).tolist())) for n in range(count)]


def probed(wrong: Sequence[int], count: int = 1, longest: int = 20, beyond: int = 2) -> list[ProbedAnswer]:
    known = texts(count)
    answers = {text.prompt: text.answer for text in known}

    def drafting(policy: StopPolicy) -> KnowsTheText:
        return KnowsTheText(policy, answers, wrong)

    return probe(drafting, "draft_model", known, longest=longest, beyond=beyond)


def test_every_position_is_judged_once_from_the_targets_own_prefix() -> None:
    found = probed(wrong=(4, 5, 11), count=20)
    assert len(found) == 20
    for answer in found:
        chains = [(chain.position, chain.right, len(chain.features)) for chain in answer.chains]
        # The first token comes with the prompt; the last one from the target's own pass.
        assert chains == [(1, 3, 6), (5, 0, 3), (6, 5, 8), (12, 17, 17)]
    examples = judged_examples(found[:1])
    assert examples.features[:, POSITION].tolist() == list(range(1, 29))
    assert np.flatnonzero(examples.labels == 0).tolist() == [3, 4, 10]
    assert examples.features[:, STEP].tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, *range(17)]


def test_chains_have_the_tokens_behind_wrong_ones_too() -> None:
    found = probed(wrong=(4, 5, 11))
    judged, chains = judged_examples(found), chain_examples(found)
    assert len(chains.labels) == len(judged.labels) + 3 * 2
    assert chains.labels.sum() == judged.labels.sum()


def test_a_source_that_drafts_nothing_is_an_error() -> None:
    class Silent(KnowsTheText):
        @override
        def draft(self, batch: Sequence[object]) -> list[object]:  # type: ignore[override]
            return [None for _ in batch]

    with refuses(ConfigurationError, field="draft_model"):
        probe(
            lambda policy: Silent(policy, {text.prompt: text.answer for text in texts(1)}, ()),
            "draft_model", texts(1), longest=4, beyond=1,
        )  # fmt: skip


def toy(count: int, seed: int, *, noise: float = 0.0) -> StopExamples:
    """Accepted where the largest probability is above 0.5 early in the draft, and above 0.8 later on."""
    random = np.random.default_rng(seed)
    top = np.sort(random.random((count, 10)), axis=1)[:, ::-1]
    step = random.integers(0, 12, count)
    rest = np.stack((random.random(count), step, random.integers(0, 200, count)), axis=1)
    labels = top[:, 0] ** 4 > np.where(step < 6, 0.5, 0.8)
    flipped = random.random(count) < noise
    return StopExamples(
        features=np.concatenate((top, rest), axis=1).astype(np.float32), labels=(labels ^ flipped).astype(np.float32)
    )


@pytest.mark.exhaustive
def test_a_separable_set_is_learnt() -> None:
    trained = train_classifier(toy(4000, 0), toy(1000, 1), DiscoRecipe())
    found = quality(trained, toy(2000, 2), theta=0.5)
    assert found.f1 > 0.95 and found.auc > 0.99
    # The index in the draft counts: without it the set is not separable.
    blind = toy(2000, 2)
    blind.features[:, STEP] = 0
    assert quality(trained, blind, theta=0.5).f1 < found.f1 - 0.02


@pytest.mark.exhaustive
def test_confidence_is_calibrated_on_noisy_labels() -> None:
    trained = train_classifier(toy(8000, 0, noise=0.2), toy(2000, 1, noise=0.2), DiscoRecipe())
    test = toy(4000, 2, noise=0.2)
    c = trained.confidence(test.features)
    assert abs(c.mean() - test.labels.mean()) < 0.03
    assert abs(test.labels[c > 0.7].mean() - 0.8) < 0.06


def test_training_repeats_bit_for_bit_and_leaves_the_random_state_alone() -> None:
    import torch

    before = torch.random.get_rng_state()
    one, two = (train_classifier(toy(500, 0), toy(200, 1), DiscoRecipe(steps=20)) for _ in range(2))
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in ("w1", "b1", "w2", "b2", "mean", "std"))
    assert torch.equal(before, torch.random.get_rng_state())


def test_too_little_or_one_sided_data_is_refused() -> None:
    with refuses(ConfigurationError, field="the train split"):
        train_classifier(toy(10, 0), toy(100, 0), DiscoRecipe())
    one_sided = StopExamples(features=toy(100, 0).features, labels=np.ones(100, np.float32))
    with refuses(ConfigurationError, field="the validation split"):
        train_classifier(toy(100, 0), one_sided, DiscoRecipe())


def says(value: Sequence[float]) -> ProbedChain:
    """A chain whose tokens have these largest probabilities."""
    features = np.zeros((len(value), 13), np.float32)
    features[:, 0] = value
    features[:, STEP] = np.arange(len(value))
    return ProbedChain(position=1, right=0, features=features)


def reads_probability() -> Classifier:
    """C > 0.5 exactly where the largest probability is > 0.5."""
    w1 = np.zeros((1, 13), np.float32)
    w1[0, 0] = 1
    zero, one = np.zeros(13, np.float32), np.ones(13, np.float32)
    return Classifier(w1=w1, b1=zero[:1], w2=np.float32([20]), b2=np.float32([-10]), mean=zero, std=one)


def answer(lengths: Sequence[int], sure: float = 0.9, unsure: float = 0.1) -> ProbedAnswer:
    """An answer along which so many drafted tokens are right; the draft model is sure of right ones only."""
    at, chains = 1, []
    for right in lengths:
        features = says([sure] * right + [unsure] * 3).features
        features[:, POSITION] = at + np.arange(len(features))
        chains.append(ProbedChain(position=at, right=right, features=features))
        at += right + 1
    return ProbedAnswer(length=at, chains=chains)


def test_places_count_passes_like_decoding_does() -> None:
    places = Places(answer([3, 0, 5]), reads_probability(), most=20)
    # 1 + 4 + 1 + 6 tokens.
    assert places.length == 12 and places.right.tolist() == [0, 3, 2, 1, 0, 0, 5, 4, 3, 2, 1, 0]
    assert places.passes(lambda at: 0) == Passes(tokens=11, target=11, draft=0)
    assert places.passes(lambda at: int(places.right[at])) == Passes(tokens=11, target=3, draft=8)
    # One wrong token each, but none at the end, where there is no room.
    assert places.classified(0.5, 20) == Passes(tokens=11, target=3, draft=4 + 1 + 5)
    # At most two: 1-2, 4 | 4? No: 1, 2, bonus 3; at 4 none is right; at 5 none; 6, 7, bonus 8; 9, 10, bonus 11.
    assert places.classified(0.5, 2) == Passes(tokens=11, target=5, draft=2 + 1 + 1 + 2 + 2)
    assert places.classified(0.0, 2).draft == 2 + 2 + 2 + 2 + 2


def test_the_index_in_the_draft_is_counted_anew_behind_a_shorter_draft() -> None:
    seen: list[list[float]] = []

    class Reads:
        def confidence(self, features: np.ndarray) -> np.ndarray:
            seen.append(features[:, STEP].tolist())
            return np.ones(len(features), np.float32)

    Places(answer([2]), Reads(), most=4)  # type: ignore[arg-type]
    assert seen == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]


def test_the_cheapest_stop_depends_on_what_a_draft_costs() -> None:
    random = np.random.default_rng(0)
    answers = [answer(random.geometric(0.3, 12) - 1) for _ in range(10)]
    cheap, dear = (choose(answers, reads_probability(), c) for c in (0.02, 0.9))
    assert cheap.max_tokens > dear.max_tokens and cheap.static > dear.static
    for chosen, c in ((cheap, 0.02), (dear, 0.9)):
        assert chosen.oracle.target + chosen.oracle.draft == chosen.oracle.tokens
        assert chosen.oracle.cost(c) <= chosen.disco.cost(c) <= chosen.static_passes.cost(c)
    # This draft model is sure of right tokens only: any theta between its two confidences is as good.
    assert 0 < cheap.theta < 1 and cheap.max_tokens in LENGTHS


def test_what_was_trained_is_what_serves(tmp_path: Path) -> None:
    trained = train_classifier(toy(500, 0), toy(200, 1), DiscoRecipe(steps=50))
    card = ClassifierCard(draft="d", target="t", theta=0.3, max_tokens=8, training={"examples": 500})
    trained.write(tmp_path / "disco.safetensors", card)
    read, same = read_classifier(tmp_path / "disco.safetensors")
    rows = toy(50, 3).features
    assert same == card and np.array_equal(read.confidence(rows), trained.confidence(rows))


def kind_of(name: str, wrong_below: float, count: int = 30) -> list[ProbedAnswer]:
    """Answers whose drafts are right where the largest probability is above a bound: another one for each kind."""
    random = np.random.default_rng(len(name))
    answers = []
    for _ in range(count):
        chains, position = [], 1
        while position < 30:
            features = np.zeros((4, len(FEATURES)), np.float32)
            features[:, 0] = random.random(4)
            features[:, STEP] = np.arange(4)
            right = int((np.cumprod(features[:, 0] > wrong_below)).sum())
            chains.append(ProbedChain(position=position, right=right, features=features[: right + 1]))
            position += right + 1
        answers.append(ProbedAnswer(length=position, kind=name, chains=chains))
    return answers


def test_transfer_measures_every_kind_by_classifiers_of_every_kind() -> None:
    kinds = {"code": kind_of("code", 0.2), "chat": kind_of("chat", 0.8)}
    cells = {(cell.trained, cell.measured): cell for cell in transfer(kinds, DiscoRecipe(steps=200), c=0.2)}
    assert len(cells) == 4
    # Each is best at home: the other one's threshold stops too early or too late.
    assert cells["code", "code"].f1 > cells["chat", "code"].f1 + 0.05
    assert cells["chat", "chat"].f1 > cells["code", "chat"].f1 + 0.05
    assert cells["code", "code"].speed > cells["chat", "code"].speed


def test_transfer_needs_two_kinds_with_answers_enough() -> None:
    with refuses(ConfigurationError, field="--transfer"):
        transfer({"code": kind_of("code", 0.2)}, DiscoRecipe(steps=2), c=0.2)
    with refuses(ConfigurationError, says="chat: the train split has"):
        transfer({"chat": kind_of("chat", 0.8, 2), "code": kind_of("code", 0.2)}, DiscoRecipe(steps=2), c=0.2)
