"""The canary for models that guess several tokens ahead: a shift and a wrong layer are refused, and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.source import make as make_blocks_source
from services.drafter.heads.canary.levels import LevelTrial
from services.drafter.heads.canary.texts import TEXTS, CanaryText, save_texts
from services.drafter.heads.canary.trial import open_trial
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.medusa.files import load_medusa, save_medusa
from services.drafter.heads.medusa.source import make
from services.drafter.heads.streams.files import load_streams
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.learnt_levels import LAYERS, blocks, check, learnt, text_of
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_medusa, make_streams

LENGTH = 90


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def text(target: Path) -> CanaryText:
    """Random tokens, so that nothing but the states tells what comes next."""
    torch.manual_seed(3)
    return text_of(target, torch.randint(4, 300, (LENGTH,)).tolist())


def medusa(target: Path, tmp_path: Path) -> LevelTrial:
    return LevelTrial.of(load_medusa(make_medusa(target, tmp_path / "medusa", own_output=True), target))


def test_a_good_one_passes_from_its_file_and_noise_does_not(target: Path, text: CanaryText, tmp_path: Path) -> None:
    trial = learnt(medusa(target, tmp_path), text, text.states[FINAL])
    found = check(trial, text, target)
    assert found.guesses > 70 and found.first > 0.9 and found.second > 0.9 and found.likely_fault is None
    folder = tmp_path / "saved"
    save_medusa(trial.model, folder, {}, dtype=torch.float32)  # type: ignore[arg-type]
    save_texts([text], folder / TEXTS)
    config = DrafterConfig(trained=TrainedConfig(checkpoints={"medusa": folder}, target=target))
    make(config)
    assert open_trial(folder, target).layers == (FINAL,)
    assert open_trial(folder, target).check([text]).first > 0.9
    noise = tmp_path / "medusa"
    save_texts([text], noise / TEXTS)
    config = DrafterConfig(trained=TrainedConfig(checkpoints={"medusa": noise}, target=target))
    with refuses(ConfigurationError, field="medusa"):
        make(config)


@pytest.mark.parametrize(("shift", "place"), [(-1, "one token before"), (1, "one token further on")])
def test_shifted_labels_are_named(target: Path, text: CanaryText, tmp_path: Path, shift: int, place: str) -> None:
    trial = learnt(medusa(target, tmp_path), text, text.states[FINAL], shift)
    with refuses(ConfigurationError, says=f"labels are shifted by one: what it guesses comes {place}"):
        check(trial, text, target)


@pytest.mark.examples(2)
@pytest.mark.parametrize("layer", [1, 3])
def test_another_layer_is_named(target: Path, text: CanaryText, tmp_path: Path, layer: int) -> None:
    folder = make_streams(target, tmp_path / "streams", layers=1)
    trial = learnt(LevelTrial.of(load_streams(folder, target)), text, text.states[layer])
    with refuses(ConfigurationError, says=f"the states of layer {layer}, not of layer 2"):
        check(trial, text, target)


def test_a_good_block_drafter_passes_from_its_file(target: Path, text: CanaryText, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    trial = learnt(blocks(target, folder), text, torch.cat((text.states[0], text.states[1]), dim=-1))
    found = check(trial, text, target)
    assert found.guesses > 70 and found.first > 0.9 and found.second > 0.9 and found.likely_fault is None
    save_file(trial.model.state_dict(), folder / "model.safetensors")
    save_texts([text], folder / TEXTS)
    assert open_trial(folder, target).layers == (0, 1)
    assert open_trial(folder, target).check([text]).first > 0.9
    make_blocks_source(DrafterConfig(trained=TrainedConfig(checkpoints={"dflash": folder}, target=target)))


@pytest.mark.parametrize(("by", "said"), [(1, "the states of layer 1, layer 2, not of layer 0, layer 1")])
def test_layers_of_a_block_drafter_that_are_off_by_one_are_named(
    target: Path, text: CanaryText, tmp_path: Path, by: int, said: str
) -> None:
    trial = learnt(blocks(target, tmp_path), text, torch.cat((text.states[by], text.states[1 + by]), dim=-1))
    with refuses(ConfigurationError, says=said):
        check(trial, text, target)


@pytest.mark.examples(2)
@pytest.mark.parametrize("anchor", [True, False])
def test_rows_of_a_block_that_guess_another_place_are_named(
    target: Path, text: CanaryText, tmp_path: Path, anchor: bool
) -> None:
    trial = learnt(blocks(target, tmp_path, from_anchor=anchor), text, torch.cat((text.states[0], text.states[1]), dim=-1))
    model = trial.model
    assert isinstance(model, BlockDrafter)
    wrong = LevelTrial.of(model.under(replace(model.config, from_anchor=not anchor)))
    with refuses(ConfigurationError, says=f"sample_from_anchor must be {str(anchor).lower()}"):
        check(wrong, text, target)


def test_another_rope_and_another_direction_show(target: Path, text: CanaryText, tmp_path: Path) -> None:
    states = torch.cat((text.states[0], text.states[1]), dim=-1)
    model = learnt(blocks(target, tmp_path), text, states).model
    assert isinstance(model, BlockDrafter)
    layer = model.config.layer
    other = replace(model.config, layer=replace(layer, rope={**layer.rope, "rope_theta": 3.0}))
    with refuses(ConfigurationError, says="its rope_parameters must be the target's"):
        check(LevelTrial.of(model.under(other)), text, target)
    # In so short a block, nearly all first guesses are right even so.
    causal = check(LevelTrial.of(model.under(replace(model.config, causal=(True,)))), text, target)
    assert causal.first < check(LevelTrial.of(model), text, target).first


def test_texts_without_the_layer(target: Path, text: CanaryText, tmp_path: Path) -> None:
    trial = LevelTrial.of(load_streams(make_streams(target, tmp_path / "streams", layers=1), target))
    other = CanaryText(tokens=text.tokens, answer=text.answer, states={FINAL: text.states[FINAL]})
    with refuses(ConfigurationError, field="the canary's texts"):
        check(trial, other, target)
