"""Several MTP layers, each for a token further ahead, compute what their formulas say, and the canary finds planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.files.target_rows import read_target_rows
from services.drafter.heads.mtp.files import load_mtp
from services.drafter.sessions.known_states import KnownStates
from speculation.tree import ROOT, depths
from speculation.types import TokenTree
from tests.drafters.feature_sources import EAGLE, draft, known, opening, report, text
from tests.tiny_models import mtp_layers as made
from tests.tiny_models.head_checkpoints import HIDDEN
from tests.tiny_models.mtp_layers import Tensors

pytestmark = pytest.mark.usefixtures("seeded")

COUNT = 3
STATES = replace(EAGLE, target_hidden_size=HIDDEN)


def layers() -> list[Tensors]:
    return [made.dense_layer() for _ in range(COUNT)]


class Formulas:
    """The chances of tokens behind a text by the formulas, in float64."""

    def __init__(self, target: Path, weights: Sequence[Tensors], **how: Any) -> None:
        rows = read_target_rows(target, dtype=torch.float64)
        self._embed, self._output = rows.embedding.rows, rows.output.rows(torch.arange(rows.output.shape[0]))
        self._weights = [{name: each.double() for name, each in layer.items()} for layer in weights]
        self._how = how

    def behind(self, tokens: Sequence[int], states: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """[V], the log-probabilities of what follows ``path`` behind a text."""
        whole = torch.tensor([*tokens, *path])
        layers = self._weights[: len(path) + 1]
        hidden = made.forward_several(layers, self._embed(whole), states, **self._how)[-1]
        return (hidden[-1] @ self._output.T).log_softmax(-1)


def numbers(held: KnownStates, count: int) -> torch.Tensor:
    rows = [held.of(position, (FINAL,)) for position in range(count)]
    return torch.stack([torch.frombuffer(bytearray(row.data), dtype=torch.float16) for row in rows if row]).double()


def far(tree: TokenTree, formulas: Formulas, tokens: Sequence[int], states: torch.Tensor) -> float:
    """How far the tree's scores are from the paths' probabilities."""
    paths: list[tuple[int, ...]] = []
    worst = 0.0
    for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
        path = paths[-1]
        logs = [formulas.behind(tokens, states, path[:at])[each] for at, each in enumerate(path)]
        worst = max(worst, abs(float(torch.stack(logs).sum().exp()) / score - 1))
    return worst


FORMS: dict[str, dict[str, Any]] = {
    "deepseek": {"chained": True},
    "mimo": {"chained": False, "state_first": True},
    "mimo_v2": {"chained": False},
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("layout", FORMS)
def test_trees_from_caches_say_what_the_formulas_say(tmp_path: Path, layout: str) -> None:
    weights = layers()
    target = made.chain(made.make_target(tmp_path), weights, layout)
    formulas = Formulas(target, weights, **FORMS[layout])
    own = FeatureSource("mtp", load_mtp(target, target, dtype=torch.float64), window=1000)
    tokens, deepest = text(12), 0
    session = own.open(opening(tokens[:3], prompt_length=1))
    for length, further in pairwise((3, 7, 8, 12)):
        held = known(range(length - 1), config=STATES)
        tree = draft(own, session, held)
        deepest = max(deepest, *depths(tree))
        assert far(tree, formulas, tokens[:length], numbers(held, length - 1)) < 1e-4
        report(session, tokens[length:further])
    assert deepest == COUNT


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"chained": False}, id="what is read"),
        pytest.param({"theta": 10_000.0}, id="rope"),
        pytest.param({"state_first": True}, id="order"),
    ],
)
def test_a_planted_fault_is_far_from_the_formulas(tmp_path: Path, how: dict[str, Any]) -> None:
    weights = layers()
    target = made.chain(made.make_target(tmp_path), weights)
    tree, tokens, states = drafted(target)
    assert far(tree, Formulas(target, weights), tokens, states) < 1e-4
    assert far(tree, Formulas(target, weights, **how), tokens, states) > 1e-2


def drafted(target: Path) -> tuple[TokenTree, list[int], torch.Tensor]:
    """A tree behind a text, with the text and its states."""
    own = FeatureSource("mtp", load_mtp(target, target, dtype=torch.float64), window=1000)
    tokens, held = text(9), known(range(8), config=STATES)
    return draft(own, own.open(opening(tokens, prompt_length=1)), held), tokens, numbers(held, 8)


def test_layers_in_another_order_and_shifted_states_are_far_from_the_formulas(tmp_path: Path) -> None:
    weights = layers()
    target = made.chain(made.make_target(tmp_path), weights)
    tree, tokens, states = drafted(target)
    assert far(tree, Formulas(target, [*weights[1:], weights[0]]), tokens, states) > 1e-2
    assert far(tree, Formulas(target, weights), tokens, states.roll(1, 0)) > 1e-2
