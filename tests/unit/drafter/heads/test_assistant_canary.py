"""An assistant that does what it was trained for passes the canary; states, layers or positions of another kind do not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from services.drafter.heads.assistant.config import Rope
from services.drafter.heads.assistant.files import load_assistant
from services.drafter.heads.assistant.head import AssistantHead
from services.drafter.heads.canary import heads as canary
from services.drafter.heads.canary.texts import layers_to_record, record_texts
from services.drafter.heads.canary.trial import open_trial
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.files.target_shape import read_target_shape
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.assistants import Pair, make_pair
from tests.unit.drafter.heads.test_canary import LENGTH, Trial


class OfAssistant(Trial):
    """A trial whose texts hang on the keys and values alone: the last state is the same everywhere."""

    def __init__(self, pair: Pair, layers: tuple[int, ...]) -> None:
        self.folder, self.shape = pair.target, read_target_shape(pair.target)
        torch.manual_seed(3)
        tokens = torch.randint(4, 320, (LENGTH,)).tolist()
        made = record_texts(pair.model, [tokens], layers_to_record(layers, self.shape), length=1)[0]
        # A random model's layers hardly change its states, unlike a trained one's: each layer's are turned here.
        turned = {layer: rows @ torch.linalg.qr(torch.randn(64, 64)).Q for layer, rows in made.states.items()}
        turned[FINAL] = torch.ones_like(made.states[FINAL])
        self.texts = [replace(made, answer=10, states=turned)]

    def under(self, states: Mapping[int, torch.Tensor]) -> OfAssistant:
        """The same with other states."""
        other = copy.copy(self)
        other.texts = [replace(self.texts[0], states={**self.texts[0].states, **states})]
        return other


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "one matrix")


@pytest.fixture(scope="module")
def trial(pair: Pair) -> OfAssistant:
    return OfAssistant(pair, open_trial(pair.folder, pair.target).layers)


@pytest.fixture(scope="module")
def learnt(trial: OfAssistant, pair: Pair) -> AssistantHead:
    """An assistant that has learnt the trial's texts by heart, and is blind to embeddings."""
    head = load_assistant(pair.folder, pair.target).requires_grad_(True)
    rows = canary._Rows(layers=head.state_layers)
    trial.teach(head, rows, [head.pre_projection.weight[:, : trial.shape.hidden_size]], steps=60)
    return head.requires_grad_(False)


def test_one_that_does_what_it_was_trained_for_passes(trial: OfAssistant, learnt: AssistantHead) -> None:
    result = trial.check(learnt)
    assert result.first > 0.9 and result.second > 0.9
    assert result.likely_fault is None


@pytest.mark.parametrize(("shift", "reason"), [(1, "of the token's own position"), (-1, "one position earlier")])
def test_shifted_states_are_refused_with_the_reason(
    trial: OfAssistant, learnt: AssistantHead, shift: int, reason: str
) -> None:
    moved = trial.under({layer: states.roll(shift, 0) for layer, states in trial.texts[0].states.items()})
    with refuses(ConfigurationError, "HEAD", says=reason):
        moved.check(learnt)


@pytest.mark.parametrize("by", [1, -1])
def test_states_of_the_layer_beside_are_refused_with_the_reason(trial: OfAssistant, learnt: AssistantHead, by: int) -> None:
    moved = trial.under({layer - by: rows for layer, rows in trial.texts[0].states.items() if layer != FINAL})
    with refuses(ConfigurationError, "HEAD", says="its layers are off by one: it wants the states of layer"):
        moved.check(learnt)


def test_other_positions_are_refused_with_the_reason(trial: OfAssistant, learnt: AssistantHead) -> None:
    assert not list(learnt.alternatives(fed_back=False)) and not list(learnt.alternatives(fed_back=True))
    other, config = copy.copy(learnt), learnt.config
    wrong = {kind: replace(each, query_rope=Rope(theta=3.0)) for kind, each in config.looked_at.items()}
    other._take_queries(replace(config, looked_at=wrong))
    with refuses(ConfigurationError, "HEAD", says="its rope_parameters must be the target's"):
        trial.check(other)
