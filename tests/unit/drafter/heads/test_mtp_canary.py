"""An MTP layer that does what it was trained for passes the canary; one whose matrix is read in another order does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.canary.texts import TEXTS, CanaryText, save_texts
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.mtp.files import load_mtp
from services.drafter.heads.mtp.head import MtpHead
from services.drafter.sources.catalogue import make_source
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.mtp_layers import alone, with_mtp
from tests.tiny_models.tiny import make_tiny_model
from tests.unit.drafter.heads.test_canary import LAYERS, RIGHT, Trial


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def learnt(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    """An MTP layer that has learnt the trial's texts by heart, and is blind to embeddings."""
    head = load_mtp(alone(trial.folder, tmp_path_factory.mktemp("mtp") / "layer"), trial.folder).requires_grad_(True)
    trial.teach(head, RIGHT, [head.layers[0].fc.weight[:, : trial.shape.hidden_size]], steps=60)
    return head.requires_grad_(False)


def test_one_that_does_what_it_was_trained_for_passes(trial: Trial, learnt: MtpHead) -> None:
    result = trial.check(learnt)
    assert result.first > 0.9 and result.second > 0.9
    assert result.likely_fault is None


def test_the_other_order_is_refused_with_the_reason(trial: Trial, learnt: MtpHead) -> None:
    ((said, swapped),) = learnt.alternatives(fed_back=False)
    assert said == "mtp_hidden_states_first must be true"
    with refuses(ConfigurationError, "HEAD", says="mtp_hidden_states_first must be false"):
        trial.check(swapped)


def test_the_targets_own_is_tried_at_start_where_the_strategy_names_it(trial: Trial, tmp_path: Path) -> None:
    whole = with_mtp(trial.folder, tmp_path / "whole")
    tokens = torch.randint(4, 320, (200,), generator=torch.Generator().manual_seed(3))
    states = torch.randn(200, trial.shape.hidden_size, generator=torch.Generator().manual_seed(3))
    save_texts([CanaryText(tokens=tokens, answer=8, states={FINAL: states})], whole / TEXTS)
    came_along = TrainedConfig(checkpoints={"mtp": whole}, target=whole, asked_for=False)
    make_source("mtp", DrafterConfig(trained=came_along))
    with refuses(ConfigurationError, whole):
        make_source("mtp", DrafterConfig(trained=replace(came_along, default_strategy="mtp")))


@pytest.mark.parametrize(("shift", "reason"), [(1, "of the token's own position"), (-1, "one position earlier")])
def test_a_shifted_one_is_refused_with_the_reason(trial: Trial, learnt: MtpHead, shift: int, reason: str) -> None:
    # The texts are moved, rather than the layer.
    moved = [
        replace(text, states={layer: states.roll(shift, 0) for layer, states in text.states.items()}) for text in trial.texts
    ]
    own, trial.texts = trial.texts, moved
    try:
        with refuses(ConfigurationError, "HEAD", says=reason):
            trial.check(learnt)
    finally:
        trial.texts = own


@pytest.fixture(scope="module")
def several(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    """The same of two layers, the second of which reads what the first made."""
    folder = alone(trial.folder, tmp_path_factory.mktemp("several") / "layers", layers=2)
    head = load_mtp(folder, trial.folder).requires_grad_(True)
    trial.teach(head, RIGHT, [layer.fc.weight[:, : trial.shape.hidden_size] for layer in head.layers], steps=60)
    return head.requires_grad_(False)


@pytest.mark.exhaustive
def test_several_layers_that_do_what_they_were_trained_for_pass(trial: Trial, several: MtpHead) -> None:
    result = trial.check(several)
    assert result.first > 0.9 and result.second > 0.9
    assert result.likely_fault is None


def test_layers_counted_from_another_one_are_refused_with_the_reason(trial: Trial, several: MtpHead) -> None:
    counted = dict(several.alternatives(fed_back=False))["its layers are counted wrong: layer 2 must be the first"]
    with refuses(ConfigurationError, "HEAD", says="its layers are counted wrong: layer 2 must be the first"):
        trial.check(counted)


def test_layers_that_read_something_else_are_told(trial: Trial, several: MtpHead) -> None:
    other = dict(several.alternatives(fed_back=True))["chain_mtp_hidden_states must be false"]
    fault = trial.check(other).likely_fault
    assert fault is not None and fault.startswith("chain_mtp_hidden_states must be true")
