"""The canary for block drafters that know the tokens before: each fault that a file may have is refused or doubted, by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.canary.levels import LevelTrial
from services.drafter.heads.canary.texts import CanaryText
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.learnt_levels import LAYERS, blocks, check, learnt, text_of
from tests.tiny_models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def text(target: Path) -> CanaryText:
    """Few different tokens, which come in a random order: the last one hardly tells what comes next."""
    torch.manual_seed(3)
    return text_of(target, torch.randint(4, 16, (90,)).tolist())


Learnt = Callable[[str], BlockDrafter]


@pytest.fixture(scope="module")
def drafter(target: Path, text: CanaryText, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """Of each kind, the one that has learnt the text by heart."""
    made: dict[str, BlockDrafter] = {}

    def of(kind: str) -> BlockDrafter:
        if kind not in made:
            trial = blocks(target, tmp_path_factory.mktemp("blocks") / kind, kind=kind)
            model = learnt(trial, text, torch.cat((text.states[0], text.states[1]), dim=-1)).model
            assert isinstance(model, BlockDrafter)
            made[kind] = model
        return made[kind]

    return of


# What tells a row the tokens before what it guesses, and a kind that has it.
HEADS = {"DSpark": "markov_head", "DFlash2": "candidate_selector", "Domino": "prefix_gru"}

LAST = {
    "markov_head": "markov_head.markov_w2.weight",
    "candidate_selector": "candidate_selector.successor_codebook",
    "prefix_gru": "embed_proj.2.weight",
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", HEADS)
def test_a_good_one_passes_and_every_fault_is_named(
    target: Path, text: CanaryText, drafter: Learnt, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model = drafter(kind)
    with caplog.at_level(logging.WARNING):
        found = check(LevelTrial.of(model), text, target)
    assert found.guesses > 70 and found.first > 0.9 and found.second > 0.9 and found.likely_fault is None
    assert not caplog.records
    layer, config = model.config.layer, model.config

    # Layers that are numbered from one.
    moved = {**text.states, 0: text.states[2], 1: text.states[0], 2: text.states[1]}
    with refuses(ConfigurationError, says="the states of layer 1, layer 2, not of layer 0, layer 1"):
        check(LevelTrial.of(model), replace(text, states=moved), target)
    # A rope that is not the target's.
    other = replace(config, layer=replace(layer, rope={**layer.rope, "rope_theta": 3.0}))
    with refuses(ConfigurationError, says="its rope_parameters must be the target's"):
        check(LevelTrial.of(model.under(other)), text, target)
    # Rows that guess another place of the block.
    anchor = not config.from_anchor
    with refuses(ConfigurationError, says=f"sample_from_anchor must be {str(not anchor).lower()}"):
        check(LevelTrial.of(model.under(replace(config, from_anchor=anchor))), text, target)
    # A head whose last matrix is read with the other sign.
    wrong, name = copy.deepcopy(model), HEADS[kind]
    wrong.get_parameter(LAST[name]).mul_(-300)
    said = f"its {name} spoils what its rows say"
    if config.gru_from:
        # First guesses do without it.
        with caplog.at_level(logging.WARNING):
            doubted = check(LevelTrial.of(wrong), text, target)
        assert doubted.likely_fault is not None and doubted.likely_fault.startswith(said) and said in caplog.text
        assert doubted.first > 0.9 and doubted.second < 0.3
    else:
        with refuses(ConfigurationError, says=said):
            check(LevelTrial.of(wrong), text, target)
