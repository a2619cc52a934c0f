"""A head that does what it was trained for passes the canary; a shifted or mis-layered one is refused with the reason."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.drafter.heads.canary import heads as canary
from services.drafter.heads.canary import verdict
from services.drafter.heads.canary.texts import (
    TEXTS,
    CanaryText,
    layers_to_record,
    read_texts,
    record_texts,
    save_texts,
    shown_layers,
)
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import FINAL, Family, TargetShape, head_for
from services.drafter.heads.files.target_rows import TargetRows, read_target_rows, read_target_shape
from services.drafter.heads.state_head import StateHead
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model

LAYERS = 8
LENGTH = 90


class Trial:
    """A target, and texts that hang on its states alone: the tokens are random, so nothing else tells what comes next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shape: TargetShape = read_target_shape(folder)
        self.rows: TargetRows = read_target_rows(folder, whole=True)
        model = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(3)
        tokens = torch.randint(4, 320, (1, LENGTH))
        made = record_texts(model, [tokens[0].tolist()], (*range(LAYERS), FINAL), length=1)[0]
        # A random model's layers hardly change its states, unlike a trained one's: each layer's are turned here.
        turns = {layer: torch.linalg.qr(torch.randn(64, 64)).Q for layer in range(LAYERS)}
        states = {layer: rows @ turns[layer] if layer in turns else rows for layer, rows in made.states.items()}
        self.texts = [replace(made, answer=10, states=states)]

        self._learnt: dict[object, FeatureHead] = {}

    def head(self, family: Family, rows: canary._Rows, steps: int = 120, **flags: int) -> FeatureHead:
        """A head that has learnt these texts by heart from rows made in this way, on two steps; it is blind to embeddings."""
        of = family, rows, steps, *sorted(flags.items())
        if of not in self._learnt:
            self._learnt[of] = self._learn(family, rows, steps, **flags)
        return copy.deepcopy(self._learnt[of])

    def _learn(self, family: Family, rows: canary._Rows, steps: int, **flags: int) -> FeatureHead:
        torch.manual_seed(4)
        config = head_for(self.shape, family, own_output=False, state_layers=rows.layers, **flags)
        head = FeatureHead(config, self.rows)
        blind = [layer.input_layernorm.weight for layer in head.layers if family == "eagle3"]
        blind += [head.connector.fc.weight[:, : self.shape.hidden_size]] if head.connector else []
        self.teach(head, rows, blind, steps)
        return head

    def teach(self, head: StateHead, rows: canary._Rows, blind: Sequence[torch.Tensor], steps: int = 120) -> None:
        """Let a head learn these texts by heart, with some of its weights at zero."""
        optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
        for _ in range(steps):
            with torch.no_grad():
                for weights in blind:
                    weights.zero_()
            loss = torch.stack([self._loss(head, text, rows) for text in self.texts]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for weights in blind:
                weights.zero_()

    def _loss(self, head: StateHead, text: CanaryText, rows: canary._Rows) -> torch.Tensor:
        at = torch.arange(max(0, -rows.shift), len(text.tokens) - 3)
        states = torch.cat([text.states[layer] for layer in rows.layers], -1)[at + rows.shift]
        attend = canary._Unrolled()
        first = head(head.embed(text.tokens[at + 1])[None], head.fuse(states)[None], at[None], attend)
        attend.go_on()
        second = head(*head.rows_behind(text.tokens[at + 2], first.state), at[None] + 1, attend)
        labels = text.tokens[at + 1 + rows.ahead], text.tokens[at + 2 + rows.ahead]
        losses = [
            torch.nn.functional.cross_entropy(head.logits(made.hidden, head.vocabulary)[0], label)
            for made, label in zip((first, second), labels, strict=True)
        ]
        return torch.stack(losses).sum()

    def check(self, head: StateHead) -> verdict.CanaryResult:
        return canary.check(head, self.texts, self.shape, "HEAD")


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS))


RIGHT = canary._Rows(layers=(FINAL,))
INNER = canary._Rows(layers=(1, 3, 4))


def changed(head: FeatureHead, **fields: object) -> FeatureHead:
    """The same tensors under another configuration."""
    other = FeatureHead(replace(head.config, **fields), head._rows)  # type: ignore[arg-type]
    other.load_state_dict(head.state_dict())
    return other


def test_a_head_that_guesses_in_parallel_is_judged_by_its_masks(trial: Trial) -> None:
    head = trial.head("eagle3", INNER, mask_token_id=300)
    result = trial.check(head)
    assert result.first > 0.9 and result.second > 0.9 and result.likely_fault is None
    # It never learnt to go on from its own states.
    assert trial.check(changed(head, mask_token_id=None)).second < 0.5
    # Another rope leaves first guesses right, which have the state of their own row.
    other = trial.check(changed(head, rope={**head.config.rope, "rope_theta": 3.0}))
    assert other.first > 0.9 and other.second < 0.5
    assert other.likely_fault is not None and other.likely_fault.startswith("its rope_parameters must be the target's")
    # Layers that are counted from one, and from two below.
    for by in (1, -1):
        wrong = changed(head, state_layers=tuple(layer + by for layer in INNER.layers))
        with refuses(ConfigurationError, says=f"it wants the states of {shown_layers(INNER.layers)}, not of"):
            trial.check(wrong)
    # States of the position beside.
    for by, place in ((1, "one position earlier"), (-1, "of the token's own position")):
        moved = [{layer: rows.roll(-by, 0) for layer, rows in text.states.items()} for text in trial.texts]
        texts = [replace(text, states=states) for text, states in zip(trial.texts, moved, strict=True)]
        with refuses(ConfigurationError, says=f"its rows are shifted by one: it wants the state {place}"):
            canary.check(head, texts, trial.shape, "HEAD")


@pytest.mark.examples(3)
@pytest.mark.parametrize("family", ["eagle", "fspad", "eagle3"])
def test_a_head_that_does_what_it_was_trained_for_passes(trial: Trial, family: Family) -> None:
    result = trial.check(trial.head(family, INNER if family == "eagle3" else RIGHT))
    assert result.guesses >= verdict.LEAST
    assert result.first > 0.9 and result.second > 0.9
    assert result.likely_fault is None


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    ("rows", "refusal"),
    [
        (replace(RIGHT, shift=1), ("HEAD", None, "rows are shifted by one: it wants the state of the token's own position")),
        (replace(RIGHT, shift=-1), ("HEAD", None, "rows are shifted by one: it wants the state one position earlier")),
    ],
)
def test_a_shifted_head_is_refused_with_the_reason(trial: Trial, rows: canary._Rows, refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal) as refused:
        trial.check(trial.head("eagle", rows))
    assert "HEAD" in str(refused.value) and "\n" not in str(refused.value)


def test_a_head_that_repeats_its_token_is_refused_with_the_reason(trial: Trial) -> None:
    head = FeatureHead(head_for(trial.shape, "eagle"), trial.rows)
    connector, size = head.connector, trial.shape.hidden_size
    assert connector is not None
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        connector.fc.weight[:, :size] = torch.eye(size)
    with refuses(ConfigurationError, field="HEAD"):
        trial.check(head)


@pytest.mark.examples(2)
@pytest.mark.parametrize("by", [1, -1])
def test_a_head_on_the_wrong_layers_is_refused_with_the_reason(trial: Trial, by: int) -> None:
    wrong = changed(trial.head("eagle3", INNER), state_layers=tuple(layer + by for layer in INNER.layers))
    with refuses(ConfigurationError, field="HEAD"):
        trial.check(wrong)


def test_a_wrong_flag_is_named(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    head = trial.head("eagle3", INNER)
    residual = canary.measure(changed(head, norm_before_residual=True), trial.texts, trial.shape)
    assert residual.first < 0.3
    assert residual.likely_fault is not None and residual.likely_fault.startswith("norm_before_residual must be false")
    with caplog.at_level(logging.WARNING):
        output = trial.check(changed(head, norm_output=True))
    assert output.first > 0.9 and output.second < 0.6
    assert output.likely_fault is not None and output.likely_fault.startswith("norm_output must be false")
    assert "may be set wrong" in caplog.text


def test_a_head_that_helps_a_little_is_refused_where_a_fault_explains_it() -> None:
    """A shifted head is right now and then."""
    found = verdict.CanaryResult(
        guesses=100, first=0.1, second=0.0, likely_fault="its rows are shifted by one (45 % that way)"
    )
    with refuses(ConfigurationError, field="HEAD"):
        verdict.judge(found, "HEAD")
    assert verdict.judge(replace(found, first=0.4), "HEAD").first == 0.4


@pytest.mark.parametrize(("recorded", "doubted"), [(None, True), (0.2, False), (0.6, True)])
def test_a_weak_head_that_is_as_good_as_its_record_is_not_doubted(
    recorded: float | None, doubted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if recorded is not None:
        record = {"evaluation": {"domains": {"all": {"agreement": [recorded, 0.1]}}}}
        (tmp_path / "training.json").write_text(json.dumps(record))
    with caplog.at_level(logging.WARNING):
        verdict.judge(verdict.CanaryResult(guesses=100, first=0.19, second=0.1), str(tmp_path))
    assert ("helps little" in caplog.text) == doubted


def test_an_untrained_head_is_refused(trial: Trial) -> None:
    with refuses(ConfigurationError, field="HEAD"):
        trial.check(trial.head("eagle", RIGHT, steps=0))


def test_a_weak_head_is_doubted(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    head = trial.head("eagle", RIGHT)
    # The target chose another token than the head learnt, three times in four.
    texts = [replace(text, tokens=text.tokens.clone()) for text in trial.texts]
    for text in texts:
        wrong = torch.arange(len(text.tokens)) % 4 > 0
        text.tokens[wrong] = (text.tokens[wrong] + 1) % 320
    with caplog.at_level(logging.WARNING):
        result = canary.check(head, texts, trial.shape, "HEAD")
    assert verdict.USELESS < result.first < verdict.DOUBTFUL
    assert "the head at HEAD helps little" in caplog.text


def test_a_checkpoint_is_checked_on_the_texts_that_it_comes_with(
    trial: Trial, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = trial.head("eagle", RIGHT)
    with caplog.at_level(logging.WARNING):
        assert canary.check_checkpoint(head, tmp_path, trial.folder) is None
    assert "without a canary's texts" in caplog.text
    save_texts(trial.texts, tmp_path / TEXTS)
    result = canary.check_checkpoint(head, tmp_path, trial.folder)
    assert result is not None and result.first > 0.9


def test_a_useless_head_that_nobody_asked_for_is_no_reason_not_to_start(
    trial: Trial, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = trial.head("eagle", RIGHT, steps=0)
    save_texts(trial.texts, tmp_path / TEXTS)
    with refuses(ConfigurationError, says="cannot use the head"):
        canary.check_checkpoint(head, tmp_path, trial.folder)
    with caplog.at_level(logging.WARNING):
        assert canary.check_checkpoint(head, tmp_path, trial.folder, asked_for=False) is None
    assert "cannot use the head" in caplog.text and "drafter.models: [] leaves it out" in caplog.text


def test_texts_without_the_heads_layers_or_too_short_say_so(trial: Trial) -> None:
    head = trial.head("eagle3", INNER, steps=0)
    texts = [replace(text, states={FINAL: text.states[FINAL]}) for text in trial.texts]
    with refuses(ConfigurationError, field="the canary's texts", says="hold no states of layer 1"):
        canary.check(head, texts, trial.shape, "HEAD")
    texts = [replace(text, answer=60) for text in trial.texts]
    with refuses(ConfigurationError, field="the canary's texts", says="tokens to guess: must be 64 at least"):
        canary.check(head, texts, trial.shape, "HEAD")


def test_texts_are_the_targets_own_and_survive_the_file(trial: Trial, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trial.folder)
    layers = layers_to_record(head_for(trial.shape, "eagle3").state_layers, trial.shape)
    assert layers == (0, 1, 2, 3, 4, 5)
    texts = record_texts(model, [[5, 6, 7], [8, 9]], (*layers, FINAL), length=12)
    assert [text.answer for text in texts] == [3, 2]
    for text in texts:
        with torch.no_grad():
            made = model(text.tokens[None], output_hidden_states=True)
        assert made.logits[0, text.answer - 1 : -1].argmax(-1).tolist() == text.tokens[text.answer :].tolist()
        # transformers' hidden_states[k] is the output of layer k - 1, and the last one is behind the final norm.
        for layer in layers:
            torch.testing.assert_close(text.states[layer], made.hidden_states[layer + 1][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(text.states[FINAL], made.hidden_states[-1][0], atol=1e-5, rtol=0)
    save_texts(texts, tmp_path / "texts" / "canary.safetensors")
    again = read_texts(tmp_path / "texts" / "canary.safetensors")
    for one, other in zip(texts, again, strict=True):
        assert one.answer == other.answer and one.tokens.tolist() == other.tokens.tolist()
        assert one.states.keys() == other.states.keys()
        torch.testing.assert_close(other.states[FINAL].float(), one.states[FINAL], atol=0.01, rtol=0.01)
    (tmp_path / "bad").write_bytes(b"nothing")
    with refuses(ConfigurationError, field="bad"):
        read_texts(tmp_path / "bad")
