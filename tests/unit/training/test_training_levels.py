"""Medusa's heads and streams in training: what the learner computes is what is served, and what it exports drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.medusa.source import MedusaSource
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.source import StreamSource
from services.drafter.heads.streams.streams import AdaptedLinear, Streams
from services.drafter.sources.interfaces import DraftWanted, ModelSource
from speculation.errors import ConfigurationError
from speculation.types import EMPTY_TREE, TokenTree
from tests.running.refusals import refuses
from tests.trainings.training_data import make_tiny_data, open_tiny
from training.data_manifest import DataManifest, write_manifest
from training.evaluate import quick_score
from training.export import export_run
from training.fitted_streams import LowRankFit, fit_start
from training.learner import trained
from training.open_run import OpenedModel, TrainingTarget, fresh_state
from training.optimizer import Optimizer
from training.recipe import load_recipe
from training.shards import read_shards
from training.trainer import RunLimits, Trainer
from training.tree_replay import passes_of
from training.vocabulary import write_vocabulary

pytestmark = pytest.mark.exhaustive

SMALL = {"steps": 60, "batch_rows": 600, "micro_rows": 300, "learning_rate": 0.03, "precision": "float32"}
RECIPES = {"streams": {"stream_layers": 1, "streams": 3, "anchors": 1.0, "rank": 32}, "medusa": {"heads": 3}}


def opened(recipe: str, target: Path, data: tuple[Path, DataManifest], **changed: object) -> OpenedModel:
    return open_tiny(load_recipe(recipe, **{**SMALL, **RECIPES[recipe], **changed}), target, *data)[0]


class Noted:
    """A source whose drafts are left out, so that it drafts from every position; with what the output layer read of them."""

    def __init__(self, source: ModelSource, model: torch.nn.Module) -> None:
        self._source, self.hidden = source, list[torch.Tensor]()
        self.open, self.forget = source.open, source.forget
        logits = model.logits

        def noting(hidden: torch.Tensor, vocabulary: object) -> torch.Tensor:
            # A request's own tokens are scored apart.
            if vocabulary is model.vocabulary:
                self.hidden.append(hidden.clone())
            return logits(hidden, vocabulary)

        model.logits = noting  # type: ignore[assignment]

    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        return [None if tree is None else EMPTY_TREE for tree in self._source.draft(batch)]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_what_is_learnt_is_what_is_drafted(recipe: str, target: Path, data: tuple[Path, DataManifest]) -> None:
    model = opened(recipe, target, data)
    module = model.learner.module
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    (sequence,) = list(read_shards(data[0], "validation", verify=False))[:1]
    with torch.no_grad():
        learnt = [each.hidden for each in model.learner.predict([sequence], 3)]
    source = model.source()
    noted = Noted(source, module)
    passes_of(noted, [model.as_served(sequence)], 1, model.layers)
    # The first draft comes twice.
    drafted = noted.hidden[1:]
    assert len(learnt) == 3 and len(learnt[0]) > 20
    for level, rows in enumerate(learnt):
        for at in range(len(rows)):
            # States of data are float16.
            assert torch.allclose(drafted[at][level], rows[at], atol=0.05), (level, at)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_what_is_exported_is_accepted_more_often_than_chance(
    recipe: str, target: Path, data: tuple[Path, DataManifest], tmp_path: Path
) -> None:
    model, run = opened(recipe, target, data), tmp_path / "run"
    held_out = read_shards(data[0], "validation", verify=False)
    shards = read_shards(data[0], "train", verify=False)
    losses: list[float] = []
    trainer = Trainer(
        model.learner, shards, model.recipe, run, fresh_state(model), lambda: quick_score(model.learner, held_out, 3, 400)
    )
    run.mkdir(exist_ok=True)
    write_manifest(run, model.manifest)
    write_vocabulary(run, model.vocabulary)
    trainer.run(RunLimits(), lambda progress: losses.append(progress.loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    export_run(run, TrainingTarget(folder=target, floats=lambda: target), tmp_path / "out", "float32")
    source: ModelSource
    if recipe == "medusa":
        source = MedusaSource(load_medusa(tmp_path / "out", target))
    else:
        source = StreamSource(load_streams(tmp_path / "out", target), window=512)
    # A random target's text says nothing about its other text: what was learnt is what was read.
    sequences = [model.as_served(each) for each in shards][:12]
    tokens = sum(len(each.tokens) - each.prompt_length - 1 for each in sequences)
    passes = sum(passes_of(source, sequences, 4, model.layers))
    # Four nodes at random out of 128 tokens would save three passes of a hundred.
    assert passes < 0.93 * tokens, (passes, tokens)


def test_kept_states_stand_for_the_layers_below(target: Path, data: tuple[Path, DataManifest], tmp_path: Path) -> None:
    """Streams that read their states from the data guess what those guess that compute them, and draft the same."""
    folder = tmp_path / "kept"
    manifest = make_tiny_data(target, folder, sequences=12, layers=(0, -1))
    found = []
    for kept in (False, True):
        model = opened("streams", target, (folder, manifest), kept_states=kept)
        assert (model.inside is None) is kept and model.layers == (0,)
        (sequence, *_) = read_shards(folder, "validation", verify=False, layers=model.columns.layers)
        with torch.no_grad():
            found.append([each.hidden for each in model.learner.predict([sequence], 3)])
        passes_of(model.source(), [model.as_served(sequence)], 4, model.layers)
        tally = model.learner.lose([sequence], np.random.default_rng(1), 0.0)
        assert tally.rows > 10
    computed, read = found
    # States of data are float16.
    assert all(torch.allclose(ours, theirs, atol=0.05) for ours, theirs in zip(computed, read, strict=True))
    with refuses(ConfigurationError, field="the layers of its states", value=[-1], allowed="among them 0"):
        opened("streams", target, data, kept_states=True)


def test_what_an_adapter_can_make_is_fitted(target: Path, data: tuple[Path, DataManifest]) -> None:
    """A map of the adapter's rank is found, whatever the sizes of its outputs; of another one, its greatest part."""
    module = opened("streams", target, data, rank=4).learner.module
    assert isinstance(module, Streams)
    adapted = module.own.layers[0].get_submodule("mlp.down_proj")
    assert isinstance(adapted, AdaptedLinear)
    generator = torch.Generator().manual_seed(1)
    inputs, outputs = adapted.lora_A.in_features, adapted.lora_B.out_features
    left, right = torch.randn(inputs, 4, generator=generator), torch.randn(4, outputs, generator=generator)
    sizes = torch.logspace(-1, 1, outputs)
    for more in (0.0, 0.3):
        fit, exact = LowRankFit(), left @ right + more * torch.randn(inputs, outputs, generator=generator)
        for _ in range(4):
            read = torch.randn(400, inputs, generator=generator)
            # What is missing is weighed by one over the outputs' sizes.
            fit.add(read, read @ exact)
        with torch.no_grad():
            fit.give(adapted, 1 / sizes, 1.0)
            made = adapted.lora_B(adapted.lora_A(read)) / sizes
            first = adapted.lora_A(read).square().mean(dim=0).sqrt()
        assert torch.allclose(first, torch.ones(4), atol=0.1)
        left_over = float((made - read @ exact).square().mean() / (read @ exact).square().mean())
        best = torch.linalg.svdvals(exact).square()
        assert left_over < 0.001 + 1.1 * float(best[4:].sum() / best.sum()), more


def test_fitted_streams_begin_nearer_to_the_rows_that_know_more(target: Path, data: tuple[Path, DataManifest]) -> None:
    """A random target says little about its next states, so they come a little nearer to what main rows make there."""
    shards = read_shards(data[0], "train", verify=False)
    model, plain = (opened("streams", target, data, fitted=fitted) for fitted in (400, 0))
    module = model.learner.module
    assert isinstance(module, Streams)
    assert fit_start(model, shards) and not fit_start(plain, shards)
    apart = []
    for each in (model, plain):
        with torch.no_grad():
            told = list(each.learner.predict(list(shards)[:10], 3))
        apart.append(sum(float((one.hidden - one.states).square().mean()) for one in told))
    assert apart[0] < 0.98 * apart[1], apart
    states = torch.cat([torch.from_numpy(model.as_served(each).states).float() for each in shards])
    assert 0.1 < float(module.stream_embeddings.detach().std() / states.std(dim=0).mean()) < 0.6
    queries = [weight for name, weight in module.trained() if name.endswith("q_proj.lora_B.weight")]
    assert queries and not any(weight.any() for weight in queries)


def test_streams_through_more_layers_than_there_are(target: Path, data: tuple[Path, DataManifest]) -> None:
    with refuses(ConfigurationError, field="stream_layers", value=2, allowed="from 1 to 1"):
        opened("streams", target, data, stream_layers=2)


def test_an_early_exit_learns_the_next_token_and_changes_no_stream(target: Path, data: tuple[Path, DataManifest]) -> None:
    generator = np.random.default_rng(0)
    sequences = list(read_shards(data[0], "train", verify=False))[:4]
    streams, totals = [], list[float]()
    for rank in (0, 8):
        model = opened("streams", target, data, pruning_rank=rank, counted="likeliest", clip_norm=None)
        learner, trainer = model.learner, Optimizer(trained(model.learner.module), model.recipe)
        losses = []
        for step in range(30):
            tally = learner.lose(sequences, generator, 0.0)
            tally.loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(tally.loss.detach()))
            trainer.make_step(step, tally.rows)
        streams.append({name: each for name, each in trained(learner.module).items() if not name.startswith("pruning.")})
        totals = losses if rank == 0 else [both - alone for both, alone in zip(losses, totals, strict=True)]
    assert all(torch.equal(each, streams[1][name]) for name, each in streams[0].items())
    # What the exit's part of the loss became.
    assert totals[-1] < 0.8 * totals[0]
