"""When a draft ends: every policy against its definition."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from cluster.models.drafters import bundled
from services.drafter.config import StopConfig
from services.drafter.stopping.classifier import (
    CLIP,
    FEATURES,
    Classifier,
    ClassifierCard,
    Disco,
    check_models,
    features_of,
    read_classifier,
)
from services.drafter.stopping.confidence import Confidence, best_threshold
from services.drafter.stopping.entropy import Entropy
from services.drafter.stopping.interface import DraftedToken, StopPolicy, StopState
from services.drafter.stopping.lengths import Heuristic, Static
from services.drafter.stopping.oracle import Oracle, Scout
from services.drafter.stopping.policies import check_stop, classifier_of, make_stop
from services.model_files.folder import model_fingerprint
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from tests.running.refusals import refuses

PROMPT = (7, 8, 9)
OPEN = OpenSession(session_id="s", tokens=PROMPT, prompt_length=3, sources=("draft_model",), max_nodes=8)


def token(step: int = 0, position: int = 0, **fields: object) -> DraftedToken:
    values: dict[str, object] = {"token": 0, "probability": 0.5, "path_probability": 0.5}
    return DraftedToken(step=step, position=position, **{**values, **fields})  # type: ignore[arg-type]


def draft(state: StopState, probabilities: Sequence[float], position: int = 0) -> int:
    """The length of a draft whose tokens have these probabilities."""
    most = min(state.begin(position), len(probabilities))
    for step in range(most):
        if not state.more(token(step, position + step, probability=probabilities[step])):
            return step + 1
    return most


def test_static_is_static() -> None:
    state = Static(4).open(OPEN)
    for accepted in (4, 0, 2):
        assert draft(state, [0.01] * 9) == 4
        state.observe(4, accepted)


def test_the_heuristic_adds_two_after_full_acceptance_and_takes_one_otherwise() -> None:
    state = Heuristic(5, transient=True).open(OPEN)
    lengths = []
    for rejected in (0, 0, 1, 3, 0):
        length = state.begin(0)
        lengths.append(length)
        state.observe(length, length - rejected)
    assert [*lengths, state.begin(0)] == [5, 7, 9, 8, 7, 9]
    for _ in range(12):
        state.observe(4, 0)
    assert state.begin(0) == 1
    # A step that checked no drafts says nothing.
    state.observe(0, 0)
    assert state.begin(0) == 1


def test_the_heuristic_grows_no_further_than_drafts_do() -> None:
    state = Heuristic(5, transient=True).open(OPEN)
    for _ in range(20):
        most = min(state.begin(0), 8)
        state.observe(most, most)
    assert state.begin(0) == 9
    state.observe(8, 3)
    assert state.begin(0) == 8


def test_only_the_lasting_heuristic_hands_its_length_on() -> None:
    for transient, then in ((True, 5), (False, 7)):
        policy = Heuristic(5, transient=transient)
        policy.open(OPEN).observe(5, 5)
        assert policy.open(OPEN).begin(0) == then


def test_confidence_stops_behind_the_unlikely_token_and_keeps_it() -> None:
    state = Confidence(6, 0.4).open(OPEN)
    assert draft(state, [0.9, 0.4, 0.39, 0.9, 0.9]) == 3
    assert draft(state, [0.1, 0.9]) == 1
    assert draft(state, [0.9] * 9) == 6
    # Threshold 0: never.
    assert draft(Confidence(6, 0.0).open(OPEN), [1e-9] * 9) == 6


def roc(probabilities: Sequence[float], matched: Sequence[bool]) -> float:
    """The same from the definition: every probability that occurs, highest first, as the threshold."""
    best, at = Fraction(5), math.nan
    for threshold in sorted(set(probabilities), reverse=True):
        wrong = [p >= threshold for p, ok in zip(probabilities, matched, strict=True) if not ok]
        right = [p >= threshold for p, ok in zip(probabilities, matched, strict=True) if ok]
        cost = Fraction(sum(wrong), len(wrong)) + 3 * (1 - Fraction(sum(right), len(right)))
        if cost < best:
            best, at = cost, threshold
    return at


def test_the_fit_finds_the_threshold_of_a_plain_roc_curve() -> None:
    random = np.random.default_rng(0)
    for size in (6, 7, 20, 200):
        for _ in range(50):
            # Few values, so that many are equal.
            probabilities = [float(p) for p in random.integers(1, 12, size) / 12]
            matched = [bool(ok) for ok in random.random(size) < probabilities]
            if 0 < sum(matched) < size:
                assert best_threshold(probabilities, matched) == roc(probabilities, matched)


def test_confidence_learns_from_judged_tokens_only() -> None:
    state = Confidence(10, 0.4).open(OPEN)
    # Three accepted, the fourth rejected; the fifth, confident as it was, has not been judged.
    assert draft(state, [0.9, 0.8, 0.7, 0.6, 0.95]) == 5
    state.observe(5, 3)
    # Only four pairs: not fitted yet.
    assert state.threshold == 0.4
    assert draft(state, [0.9, 0.5, 0.99]) == 3
    state.observe(3, 1)
    judged = [0.9, 0.8, 0.7, 0.6, 0.9, 0.5]
    assert state.threshold == roc(judged, [True, True, True, False, True, False]) == 0.7
    assert draft(state, [0.9, 0.69, 0.9]) == 2


def test_a_draft_that_was_never_checked_teaches_nothing() -> None:
    state = Confidence(10, 0.4).open(OPEN)
    draft(state, [0.99] * 5)
    draft(state, [0.3])
    state.observe(1, 0)
    draft(state, [0.9] * 6)
    state.observe(6, 6)
    assert state.threshold == roc([0.3, *[0.9] * 6], [False, *[True] * 6]) == 0.9


def test_svip_stops_at_high_entropy() -> None:
    state = Entropy(5, 0.3).open(OPEN)
    # sqrt(0.15 * 0.6) = 0.3.
    assert state.more(token(entropy=0.599)) and not state.more(token(entropy=0.601))
    assert state.begin(0) == 5


def classifier(seed: int = 0) -> Classifier:
    random = np.random.default_rng(seed)
    shapes = {"w1": (32, 13), "b1": (32,), "w2": (32,), "b2": (1,), "mean": (13,)}
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return Classifier(**weights, std=random.uniform(0.1, 2, 13).astype(np.float32))


def test_disco_computes_what_torch_computes() -> None:
    own = classifier()
    rows = np.random.default_rng(1).normal(scale=3, size=(64, 13)).astype(np.float32)
    w = {name: torch.from_numpy(tensor) for name, tensor in asdict(own).items()}
    x = ((torch.from_numpy(rows) - w["mean"]) / w["std"]).clamp(-CLIP, CLIP)
    hidden = torch.nn.functional.linear(x, w["w1"], w["b1"]).relu()
    expected = torch.nn.functional.linear(hidden, w["w2"][None], w["b2"]).sigmoid()[:, 0]
    np.testing.assert_allclose(own.confidence(rows), expected.numpy(), rtol=1e-5, atol=1e-6)
    assert np.std(own.confidence(rows)) > 0.05


def test_disco_reads_what_its_inputs_are_called() -> None:
    x = features_of([0.6, 0.3], 0.7, 4, 31)
    assert dict(zip(FEATURES, x.tolist(), strict=True)) == pytest.approx(
        {f"probability_{rank}": 0.0 for rank in range(3, 11)}
        | {"probability_1": 0.6, "probability_2": 0.3, "entropy": 0.7, "draft_index": 4, "answer_index": 31}
    )


def only(feature: str, weight: float, bias: float) -> Classifier:
    """C = sigmoid(weight * feature + bias), for weight * feature >= 0."""
    w1 = np.zeros((1, 13), dtype=np.float32)
    w1[0, FEATURES.index(feature)] = abs(weight)
    one, zero = np.ones(13, dtype=np.float32), np.zeros(13, dtype=np.float32)
    return Classifier(
        w1=w1, b1=zero[:1], w2=np.float32([math.copysign(1, weight)]), b2=np.float32([bias]), mean=zero, std=one
    )


def test_disco_stops_below_theta_and_at_the_most_tokens() -> None:
    # C = sigmoid(8 * probability - 4): 0.5 at probability 0.5.
    policy = Disco(only("probability_1", 8, -4), theta=0.5, max_tokens=6)
    state = policy.open(OPEN)
    assert state.begin(0) == 6
    assert state.more(token(top=[0.51])) and not state.more(token(top=[0.49]))
    # Either position can end a draft.
    for feature in ("draft_index", "answer_index"):
        state = Disco(only(feature, -2, 5), theta=0.5, max_tokens=6).open(OPEN)
        assert state.more(token(step=2, position=2, top=[0.9]))
        steps = {"draft_index": (3, 2), "answer_index": (2, 3)}[feature]
        assert not state.more(token(step=steps[0], position=steps[1], top=[0.9]))


CARD = ClassifierCard(draft="d" * 64, target="t" * 64, theta=0.25, max_tokens=12)


def test_a_classifier_survives_its_file(tmp_path: Path) -> None:
    own, file = classifier(), tmp_path / "disco.safetensors"
    own.write(file, CARD)
    read, card = read_classifier(file)
    assert card == CARD
    assert all(np.array_equal(tensor, getattr(own, name)) for name, tensor in asdict(read).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disco.json", "disco.safetensors"]


@pytest.mark.parametrize(
    ("card", "tensors", "refusal"),
    [
        ({"theta": 1.5}, {}, ("disco.safetensors", None, "theta is 1.5")),
        ({"theta": "much"}, {}, ("disco.safetensors", None, "could not convert")),
        ({"max_tokens": 0}, {}, ("disco.safetensors", None, "max_tokens 0")),
        ({"features": ["entropy"]}, {}, ("disco.safetensors", None, "its inputs are entropy")),
        ({"lenience": 0.1}, {}, ("disco.safetensors", None, "lenience is not known")),
        (
            {},
            {"w1": np.zeros((32, 12), np.float32)},
            ("disco.safetensors", None, "w1 is float32[32, 12], must be float32[32, 13]"),
        ),
        ({}, {"b2": np.zeros(1, np.float64)}, ("disco.safetensors", None, "b2 is float64")),
        ({}, {"w2": np.full(32, np.nan, np.float32)}, ("disco.safetensors", None, "w2 holds a number that is not finite")),
        ({}, {"std": np.zeros(13, np.float32)}, ("disco.safetensors", None, "std holds a number that is not above 0")),
        ({}, {"w3": np.zeros(13, np.float32)}, ("disco.safetensors", None, "w3")),
    ],
)
def test_a_damaged_classifier_is_refused(
    tmp_path: Path, card: dict[str, object], tensors: dict[str, np.ndarray], refusal: tuple[object, ...]
) -> None:
    file = tmp_path / "disco.safetensors"
    (tmp_path / "disco.json").write_text(json.dumps(asdict(CARD) | card))
    save_file(asdict(classifier()) | tensors, file)
    with refuses(ConfigurationError, *refusal):
        read_classifier(file)


def test_missing_or_torn_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "disco.safetensors"
    with refuses(ConfigurationError, field="disco.json"):
        read_classifier(file)
    classifier().write(file, CARD)
    file.write_bytes(file.read_bytes()[:100])
    with refuses(ConfigurationError, field="disco.safetensors"):
        read_classifier(file)


def model(folder: Path, value: float) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": np.full(4, value, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_classifier_serves_the_models_that_it_was_trained_on_only(tmp_path: Path) -> None:
    draft_model, target, other = (model(tmp_path / name, n) for n, name in enumerate(("draft", "target", "other")))
    file = tmp_path / "disco.safetensors"
    card = replace(CARD, draft=model_fingerprint(draft_model), target=model_fingerprint(target))
    classifier().write(file, card)
    config = StopConfig(policy="disco", disco=file)
    policy = make_stop(config, draft_model, target)
    assert isinstance(policy, Disco) and policy.open(OPEN).begin(0) == 12
    with refuses(ConfigurationError, field="disco.safetensors", says="another draft model"):
        make_stop(config, other, target)
    with refuses(ConfigurationError, field="disco.safetensors", says="another target"):
        make_stop(config, draft_model, other)
    with refuses(ConfigurationError, field="drafter.stop_policy", value="disco"):
        make_stop(StopConfig(policy="disco"), draft_model, target)
    with refuses(ConfigurationError, field="drafter.stop_policy", value="disco"):
        check_stop(StopConfig(policy="disco"), [draft_model])


def test_a_draft_models_own_classifier_is_the_default(tmp_path: Path) -> None:
    draft_model, target, other = (model(tmp_path / name, n) for n, name in enumerate(("draft", "target", "other")))
    before = model_fingerprint(draft_model)
    own = draft_model / "disco" / "classifier.safetensors"
    own.parent.mkdir()
    classifier().write(own, replace(CARD, draft=before, target=model_fingerprint(target)))
    assert model_fingerprint(draft_model) == before and classifier_of(draft_model) == own and classifier_of(other) is None
    config = StopConfig(policy="disco")
    check_stop(config, [draft_model])
    assert isinstance(make_stop(config, draft_model, target), Disco)
    with refuses(ConfigurationError, field="classifier.safetensors", says="another target"):
        make_stop(config, draft_model, other)
    # One that is named goes before it.
    with refuses(ConfigurationError, field="named.json"):
        check_stop(replace(config, disco=tmp_path / "named.safetensors"), [draft_model])


def test_the_classifier_that_comes_along_is_for_the_draft_model_beside_it() -> None:
    (folder,) = (folder for folder in bundled("smollm2-135m-instruct") if folder.name == "draft_model")
    file = classifier_of(folder)
    assert file is not None
    own, card = read_classifier(file)
    check_models(card, file, model_fingerprint(folder), card.target)
    sure, unsure = token(top=(0.98, *[0.001] * 9), entropy=0.15), token(top=(0.1, *[0.05] * 9), entropy=6.0)
    disco = Disco(own, card.theta, card.max_tokens)
    assert disco.more(sure) and not disco.more(unsure)


@pytest.mark.parametrize(
    ("name", "kind", "reads"),
    [
        ("static", Static, False),
        ("heuristic", Heuristic, False),
        ("heuristic_transient", Heuristic, False),
        ("confidence", Confidence, False),
        ("entropy", Entropy, True),
    ],
)
def test_settings_name_policies(name: str, kind: type[StopPolicy], reads: bool) -> None:
    config = StopConfig(policy=name, num_assistant_tokens=9)  # type: ignore[arg-type]
    policy = make_stop(config, Path("draft"), Path("target"))
    assert isinstance(policy, kind) and policy.reads_distribution is reads
    assert policy.open(OPEN).begin(0) == 9
    policy.open(OPEN).observe(9, 9)
    assert policy.open(OPEN).begin(0) == (11 if name == "heuristic" else 9)


def test_the_oracle_drafts_what_the_scout_found_right() -> None:
    answer = (1, 2, 3, 4, 5, 6)
    scout = Scout({PROMPT: answer}, longest=8)
    state = scout.open(OPEN)
    assert state.begin(1) == 8
    assert state.more(token(0, 1, token=2)) and state.more(token(1, 2, token=3)) and not state.more(token(2, 3, token=9))
    assert state.begin(4) == 8 and not state.more(token(0, 4, token=9))
    # Behind the end of the text nothing is right.
    assert state.begin(6) == 8 and not state.more(token(0, 6, token=6))
    oracle = Oracle(scout.lengths).open(OPEN)
    assert [oracle.begin(position) for position in (1, 4, 6)] == [2, 0, 0]
    assert oracle.more(token(0, 1, token=2))
