"""Streams that were trained with the target's own rows: what is learnt is what the paper's row decodes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.papers.shared_streams import is_shared, shared_streams
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.streams.files import load_streams, save_streams
from services.drafter.heads.streams.streams import Streams
from services.drafter.heads.streams.whole_texts import main_and_streams
from services.model_files.folder import read_json
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.trainings.training_data import open_tiny
from training.data_manifest import DataManifest
from training.open_run import OpenedModel
from training.recipe import load_recipe
from training.shards import read_shards

SMALL = {"stream_layers": 1, "streams": 2, "anchors": 1.0, "rank": 4, "precision": "float32", "micro_rows": 200}


def _opened(target: Path, data: tuple[Path, DataManifest], main_weight: float) -> OpenedModel:
    opened = open_tiny(load_recipe("streams", **SMALL, main_weight=main_weight), target, *data)[0]
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in opened.learner.module.trained():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    return opened


@pytest.fixture
def folder(target: Path, data: tuple[Path, DataManifest], tmp_path: Path) -> Path:
    """Shared streams, as they are exported."""
    module = _opened(target, data, 10.0).learner.module
    assert isinstance(module, Streams)
    save_streams(module, tmp_path / "shared", {}, dtype=torch.float32)
    return tmp_path / "shared"


def test_whatever_serves_refuses_them(target: Path, data: tuple[Path, DataManifest], folder: Path, tmp_path: Path) -> None:
    assert is_shared(folder) and not is_shared(target) and not is_shared(tmp_path)
    with refuses(ConfigurationError, field="mode", value="shared", allowed="change what it says"):
        inspect(folder, target)
    with refuses(ConfigurationError, field="mode", value="shared"):
        load_streams(folder, target)
    with refuses(ConfigurationError, field="the recipe's main_weight", value="10.0"):
        _opened(target, data, 10.0).source()
    with refuses(ConfigurationError, field="--drafter", says="leave out the others"):
        shared_streams([folder, tmp_path / "other"], target, tmp_path / "apart")


@pytest.mark.parametrize(("field", "value"), [("fitted", 10), ("pruning_rank", 2)])
def test_what_is_for_a_target_that_stays_is_refused(field: str, value: int) -> None:
    with refuses(ConfigurationError, says=f"{field} is {value}, but main_weight is 10"):
        load_recipe("streams", main_weight=10.0, **{field: value})


def test_the_parts_compute_what_was_trained(
    target: Path, data: tuple[Path, DataManifest], folder: Path, tmp_path: Path
) -> None:
    """The base model with the LoRA adapter says what the main rows in training said; the streams are as they were."""
    module = _opened(target, data, 10.0).learner.module
    assert isinstance(module, Streams)
    parts = shared_streams([folder], target, tmp_path / "apart")
    assert parts is not None and read_json(parts.streams / "config.json", of="drafter")["mode"] == "frozen"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        states = model.model(tokens, output_hidden_states=True).hidden_states[module.config.state_layer + 1]
        adapter = load_file(parts.adapter / "adapter_model.safetensors")
        for name, down in adapter.items():
            if "lora_A" in name:
                linear = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                linear.weight += adapter[name.replace("lora_A", "lora_B")] @ down
        wanted = model.model(tokens).last_hidden_state
        main, streams = main_and_streams(module, states, torch.arange(20)[None])
        frozen = load_streams(parts.streams, target)
        untuned, _ = main_and_streams(frozen, states, torch.arange(20)[None])
    torch.testing.assert_close(main, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(untuned, wanted, atol=1e-2)
    assert torch.equal(frozen.stream_embeddings, module.stream_embeddings) and streams.shape[2] == 2


@pytest.mark.parametrize("main_weight", [0.0, 10.0])
def test_only_shared_streams_learn_from_the_text(main_weight: float, target: Path, data: tuple[Path, DataManifest]) -> None:
    learner = _opened(target, data, main_weight).learner
    shards = read_shards(data[0], "train", verify=False)
    tally = learner.lose([shards.sequence(0)], np.random.default_rng(1), 0.0)
    assert set(tally.parts) == ({"target's own", "streams"} if main_weight else set())
    if main_weight:
        own = tally.parts["target's own"]
        # What is left is the streams'.
        assert 0 < main_weight * own < float(tally.loss.detach())
    tally.loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for _, parameter in learner.module.trained())  # type: ignore[operator]
