"""The comparison of models that draft: what it counts, the states that it replays, and what pruning would drop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.replay.replay import Trace
from lab.ahead_models import by_task, compare_models, find_models, prune_models
from lab.known_texts import KnownText, read_states, replay_texts, tree_states
from lab.tree_pruning import EdgesOfStep, prune_at
from services.drafter.heads.choosing_session import ChoosingSession
from services.drafter.sources.interfaces import DraftWanted
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.messages import OpenSession
from speculation.types import TokenTree
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_medusa, make_streams
from tests.unit.drafter.heads.test_streams import LAYERS, TEXT

pytestmark = pytest.mark.exhaustive

PROMPT, STATE = 20, LAYERS - 2
TRACE = Trace(prompt=tuple(TEXT[:PROMPT]), output=tuple(TEXT[PROMPT:50]), task="toy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(model: Path) -> TransformersTarget:
    return TransformersTarget(TargetConfig(model_path=str(model), threads=1, kv_cache_tokens=2048, max_model_len=512))


@pytest.fixture(scope="module")
def known(target: TransformersTarget) -> KnownText:
    return read_states(target, TRACE, [STATE, -1])


def test_a_text_is_known_without_states_too(target: TransformersTarget) -> None:
    """A draft model reads none."""
    assert read_states(target, TRACE, []) == KnownText(TRACE, {})


class Knows:
    """A source that drafts the text's next two tokens, and a wrong one beside them."""

    def open(self, message: OpenSession) -> ChoosingSession:
        return ChoosingSession(message, torch.zeros(0, dtype=torch.int64))

    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        found: list[TokenTree | None] = []
        for wanted in batch:
            at = len(wanted.session.tokens)
            right = TEXT[at : at + 2]
            tokens = (*right, 3)
            found.append(TokenTree(tokens=tokens, parents=(*range(-1, len(right) - 1), -1), sources=("k",) * len(tokens)))
        return found

    def forget(self, tenant: str) -> None:
        """Nothing is kept."""


def test_passes_are_counted_behind_the_first_token(known: KnownText) -> None:
    result = replay_texts(Knows(), [(known, None)], (), 4)
    # 30 tokens: the first comes with the prompt, then three for every pass, the last pass brings two.
    assert [step.accepted for step in result.steps] == [2] * 9 + [1]
    assert result.tau == pytest.approx(29 / 10) and result.call_reduction == pytest.approx(30 / 11)


def test_states_in_a_tree_are_those_of_the_text(target: TransformersTarget, known: KnownText) -> None:
    steps = replay_texts(Knows(), [(known, None)], (), 4).steps
    for step, states in zip(steps, tree_states(target, known, steps, STATE), strict=True):
        rows = known.states[STATE][step.length - 1 : step.length - 1 + 1 + min(step.accepted, 1)]
        assert np.array_equal(states[: len(rows)].half().numpy(), rows)
        assert not np.array_equal(states[-1].half().numpy(), rows[0])


def test_models_of_each_kind_are_compared(model: Path, target: TransformersTarget, known: KnownText, tmp_path: Path) -> None:
    folders = [
        make_streams(model, tmp_path / "streams", layers=LAYERS - STATE - 1, pruning_rank=2),
        make_medusa(model, tmp_path / "heads"),
    ]
    models = find_models(folders, model)
    records = list(compare_models(models, [known], [6]))
    assert [(each["model"], each["levels"], each["form"]) for each in records] == [
        *(("streams", levels, "one pass") for levels in (1, 2, 3)),
        ("streams", 3, "two steps, 2 texts"),
        *(("heads", levels, "") for levels in (1, 2, 3)),
        ("heads", 3, "fixed tree"),
    ]
    # The same drafts, wherever their streams are computed.
    assert records[2]["tau"] == records[3]["tau"]
    json.dumps(records)
    assert all(each["tau_by_task"] == {known.trace.task: pytest.approx(each["tau"])} for each in records)
    lines = by_task(records).splitlines()
    assert [line.split("|")[1].strip() for line in lines[1:]] == ["model, nodes", "---", "streams, 6", "heads, 6"]
    ((name, size, found),) = prune_models(models, [known], [6], [0.5], target)
    assert (name, size) == ("streams", 6)
    assert (found[0].dropped, found[0].lost_drafts, found[0].work) == (0, 0, 1)
    assert found[0].tau == pytest.approx(records[2]["tau"])
    assert 0 < found[1].dropped <= 1 and found[1].tau <= found[0].tau and found[1].work < 1


def test_what_hangs_on_a_dropped_edge_goes_with_it() -> None:
    tree = TokenTree(tokens=(1, 2, 3, 4), parents=(-1, 0, 1, -1), sources=("s",) * 4)
    step = EdgesOfStep(tree, (0.9, 0.2, 0.8, 0.7), (0, 1, 2))
    found = prune_at(0.5, [step], 30, 6, 4)
    # Nodes 1 and 2 go; of three accepted tokens, one is left, and the last row's streams are missing.
    assert (found.dropped, found.tau, found.lost_drafts) == (0.5, 2.0, 1.0)
    assert found.work == pytest.approx((5 * 24 + 3 * 5 * 6) / (5 * (30 + 24)))
    whole = prune_at(0.0, [step], 30, 6, 4)
    assert (whole.dropped, whole.tau, whole.lost_drafts, whole.work) == (0.0, 4.0, 0.0, 1.0)
