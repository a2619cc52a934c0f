"""Draft models that leave out what is their target's own: loaded as the whole model, for that target alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.models.drafters import by_kernels
from services.drafter.draft_model.loading import load_draft_model
from services.drafter.draft_model.source import DraftModelSource
from services.drafter.heads.files.kinds import inspect
from services.model_files.weights.files import WeightFiles, quantize_folder
from services.model_files.weights.headers import check_weights, read_shapes
from speculation.errors import ConfigurationError
from tests.drafters.draft_model_sessions import PROMPT, opened, refused, same, source_of, wanted
from tests.kernels.kernels_here import needs_kernels
from tests.running.refusals import refuses
from tests.tiny_models.draft_models import make_sharing_draft
from tests.tiny_models.tiny import make_tiny_model
from training.recipe import LayersRecipe


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "two matrices"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = make_tiny_model(folder / "target", tie_word_embeddings=request.param)
    return target, *make_sharing_draft(target, folder)


def drafts(source: DraftModelSource) -> torch.Tensor:
    return source.logits_behind(PROMPT, 4)


def test_its_files_hold_its_own_weights_alone(models: tuple[Path, Path, Path]) -> None:
    target, whole, own = models
    held = set(read_shapes(own))
    assert held and not any("embed" in name or "lm_head" in name or ".layers.0." in name for name in held)
    assert not (own / "tokenizer.json").exists()
    with WeightFiles(own, target) as files, WeightFiles(whole) as all_of_it:
        assert files.names == all_of_it.names
        assert all(torch.equal(files.get(name), all_of_it.get(name)) for name in files.names)  # type: ignore[arg-type]
    left, right = inspect(own, target), inspect(whole, target)
    assert (left.source, left.numbers) == (right.source, right.numbers) == ("draft_model", right.numbers)
    assert inspect(own, None).source == "draft_model"


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])
def test_the_same_logits_as_the_whole_model(models: tuple[Path, Path, Path], kernels: bool) -> None:
    target, whole, own = models
    by = {"draft_kernels": by_kernels} if kernels else {}
    left, right = source_of(target, own, **by), source_of(target, whole, **by)
    assert torch.equal(drafts(left), drafts(right))
    (one,), (other,) = (source.draft([wanted(opened(source, PROMPT), 12)]) for source in (left, right))
    assert one is not None and other is not None and len(one) and same(one, other)


@needs_kernels
def test_kernels_and_torch_agree_on_blocks(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, _, own = models
    blocks = Path(shutil.copytree(own, tmp_path / "blocks"))
    quantize_folder(blocks)
    left, right = source_of(target, blocks, draft_kernels=by_kernels), source_of(target, blocks)
    assert torch.allclose(drafts(left), drafts(right), atol=1e-4)
    assert not torch.allclose(drafts(left), drafts(source_of(target, own)), atol=1e-4)


def test_layers_from_elsewhere_in_the_target(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", num_hidden_layers=2)
    whole, own = make_sharing_draft(target, tmp_path, LayersRecipe(kind="draft_model", layers=(1, 0), frozen_layers=1))
    assert torch.equal(drafts(source_of(target, own)), drafts(source_of(target, whole)))
    # Another layer in its place is noticed.
    content = json.loads((own / "config.json").read_text())
    content["shared_with_target"]["modules"]["model.layers.0"] = "model.layers.0"
    (own / "config.json").write_text(json.dumps(content))
    assert "was made for another target" in refused(target, own)


def altered(models: tuple[Path, Path, Path], folder: Path, change: Callable[[dict[str, object]], object]) -> Path:
    copy = Path(shutil.copytree(models[2], folder))
    content = json.loads((copy / "config.json").read_text())
    change(content["shared_with_target"])
    (copy / "config.json").write_text(json.dumps(content))
    return copy


def test_another_target_is_refused(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, whole, own = models
    other = Path(shutil.copytree(target, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    said = refused(other, own)
    assert "was made for another target: the weights that it shares have the checksum" in said and str(own) in said
    # What is not shared may differ.
    shutil.copy(whole / "model.safetensors", other / "model.safetensors")
    assert len(drafts(source_of(other, own))) == 4
    wide = make_tiny_model(tmp_path / "wide", hidden_size=128)
    with refuses(ConfigurationError, field="hidden_size", value=64, allowed="128, the target's"):
        inspect(own, wide)
    unsaid = json.loads((wide / "config.json").read_text()) | {"hidden_size": None}
    (wide / "config.json").write_text(json.dumps(unsaid))
    with refuses(ConfigurationError, field="hidden_size", value=64, allowed="null, the target's"):
        inspect(own, wide)
    assert "another target" in refused(wide, own)


def test_what_cannot_be_shared_is_refused(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, whole, own = models

    def modules(case: str, change: Callable[[dict[str, object]], object]) -> str:
        return refused(target, altered(models, tmp_path / case, change))

    def renamed(shared: dict[str, object]) -> None:
        shared["modules"] = {"model.layers.0": "model.layers.7"}

    assert "no weights of model.layers.7" in modules("layer", renamed)
    assert "must hold modules and sha256" in modules("extra", lambda shared: shared.update(scale=2))
    assert "modules must hold at least one" in modules("none", lambda shared: shared.update(modules={}))
    assert "sha256 is 'x': must be 64" in modules("sum", lambda shared: shared.update(sha256="x"))
    both = Path(shutil.copytree(own, tmp_path / "both"))
    shutil.copy(whole / "model.safetensors", both / "model.safetensors")
    assert "which shared_with_target in its config.json says is the target's" in refused(target, both)
    with refuses(ConfigurationError, says="cannot load the model"):
        load_draft_model(own, tmp_path, device="cpu", dtype="float32")
    # Served as a target, it lacks a layer.
    with refuses(ConfigurationError, field="own"):
        check_weights(own, {"num_hidden_layers": 2})
