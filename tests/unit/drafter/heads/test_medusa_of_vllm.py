"""Medusa's heads in vLLM's layout draft what they draft in their authors'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.levels import LevelForm
from services.drafter.heads.medusa.files import load_medusa, save_medusa
from services.drafter.heads.medusa.source import MedusaSource
from speculation.errors import ConfigurationError
from speculation.types import TokenTree
from tests.running.refusals import refuses
from tests.tiny_models.trained_heads import make_medusa
from tests.unit.drafter.heads.test_medusa import HEADS, drafted, state, target

__all__ = ["target"]

Tensors = dict[str, torch.Tensor]


def of_vllm(authors: Path, folder: Path, blocks: int, **config: Any) -> tuple[Tensors, dict[str, Any]]:
    """The same heads by vLLM's names, and its configuration; not written yet."""
    names = {f"{head}.{blocks}.weight": f"lm_heads.{head}.weight" for head in range(HEADS)}
    for head in range(HEADS):
        for block in range(blocks):
            for part in ("weight", "bias"):
                names[f"{head}.{block}.linear.{part}"] = f"blocks.{head}.layers.{block}.{part}"
    tensors = {names[name]: tensor for name, tensor in load_file(authors / "model.safetensors").items()}
    size = json.loads((authors / "config.json").read_text())
    fields = {"model_type": "medusa", "hidden_size": size["hidden_size"], "vocab_size": size["vocab_size"]}
    folder.mkdir()
    return tensors, {**fields, "num_heads": HEADS, "num_hidden_layers": blocks, "medusa_fc_bias": True, **config}


def trees(folder: Path, target: Path) -> list[TokenTree | None]:
    source = MedusaSource(load_medusa(folder, target), form=LevelForm(width=12))
    return drafted(source, [state(1), state(2)])


def check_alike(found: list[TokenTree | None], wanted: list[TokenTree | None]) -> None:
    """But for rounding, since the rows of all heads go through one product."""
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and other is not None
        assert (one.tokens, one.parents) == (other.tokens, other.parents)
        assert one.scores == pytest.approx(other.scores)


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_they_draft_the_same(target: Path, tmp_path: Path, blocks: int, prefix: str) -> None:
    authors = make_medusa(target, tmp_path / "authors", own_output=True, blocks=blocks)
    tensors, config = of_vllm(authors, tmp_path / "vllm", blocks)
    folder = write(tmp_path / "vllm", {f"{prefix}{name}": tensor for name, tensor in tensors.items()}, config)
    assert inspect(folder, target).source == inspect(folder, None).source == "medusa"
    check_alike(trees(folder, target), trees(authors, target))


def test_one_output_layer_for_all_heads_and_no_bias(target: Path, tmp_path: Path) -> None:
    authors = make_medusa(target, tmp_path / "authors", own_output=True)
    tensors, config = of_vllm(authors, tmp_path / "vllm", 1, medusa_fc_bias=False, original_lm_head=True)
    own = load_file(authors / "model.safetensors")
    for head in range(HEADS):
        own[f"{head}.0.linear.bias"].zero_()
        own[f"{head}.1.weight"] = own["0.1.weight"]
        del tensors[f"blocks.{head}.layers.0.bias"]
        if head:
            del tensors[f"lm_heads.{head}.weight"]
    save_file({name: tensor.clone() for name, tensor in own.items()}, authors / "model.safetensors")
    folder = write(tmp_path / "vllm", tensors, config)
    check_alike(trees(folder, target), trees(authors, target))
    # And written by us, in the authors' names.
    save_medusa(load_medusa(folder, target), tmp_path / "saved", {}, dtype=torch.float32)
    check_alike(trees(tmp_path / "saved", target), trees(authors, target))


@pytest.mark.parametrize("cut", [True, False])
def test_a_token_map_cuts_the_vocabulary(target: Path, tmp_path: Path, cut: bool) -> None:
    authors = make_medusa(target, tmp_path / "authors", own_output=True)
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:60]
    tensors, config = of_vllm(authors, tmp_path / "vllm", 1, truncated_vocab_size=60)
    tensors["token_map"] = ids
    if cut:
        tensors |= {name: tensor[ids] for name, tensor in tensors.items() if name.startswith("lm_heads.")}
    else:
        # A request's other tokens are not drafted, however likely.
        tensors["lm_heads.0.weight"][sorted(set(range(200)) - set(ids.tolist()))] *= 50
    folder = write(tmp_path / "vllm", tensors, config)
    found = trees(folder, target)
    assert all(tree is not None and len(tree) == 12 and set(tree.tokens) <= set(ids.tolist()) for tree in found)
    ordered = ids.sort().values
    own = load_file(authors / "model.safetensors")
    own |= {f"{head}.1.weight": own[f"{head}.1.weight"][ordered] for head in range(HEADS)}
    own["d2t"] = ordered - torch.arange(60)
    write(authors, own, {**json.loads((authors / "config.json").read_text()), "draft_vocab_size": 60})
    check_alike(found, trees(authors, target))


Change = Callable[[Tensors, dict[str, Any]], object]
WRONG: list[tuple[Change, tuple[object, ...]]] = [
    (lambda tensors, config: config.update(num_heads=2), ("num_heads", 2)),
    (lambda tensors, config: config.update(num_hidden_layers=2), ("num_hidden_layers", 2)),
    (lambda tensors, config: config.update(logit_scale=0.0625), ("logit_scale", "0.0625")),
    (lambda tensors, config: config.update(medusa_fc_bias=False), ("medusa_fc_bias", "false")),
    (lambda tensors, config: config.update(original_lm_head=True), ("the tensor 1.1.weight", "unknown")),
    (lambda tensors, config: config.update(truncated_vocab_size=7), ("truncated_vocab_size", 7)),
    (lambda tensors, config: tensors.pop("lm_heads.1.weight"), ("the tensor 1.1.weight", "missing")),
    (lambda tensors, config: tensors.pop("blocks.1.layers.0.weight"), ("the tensor 1.0.linear.weight", "missing")),
]


@pytest.mark.parametrize(("change", "refusal"), WRONG)
def test_what_does_not_fit_is_refused_by_name(
    target: Path, tmp_path: Path, change: Change, refusal: tuple[object, ...]
) -> None:
    tensors, config = of_vllm(make_medusa(target, tmp_path / "authors", own_output=True), tmp_path / "vllm", 1)
    change(tensors, config)
    folder = write(tmp_path / "vllm", tensors, config)
    for read in (load_medusa, inspect):
        with refuses(ConfigurationError, *refusal):
            read(folder, target)
