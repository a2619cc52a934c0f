"""Weights in blocks of eight bits: every loader of drafters reads them, as the numbers that they stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cluster.models.drafters import by_kernels
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.streams.files import load_streams
from services.model_files.weights.files import WeightFiles, quantize_folder
from services.model_files.weights.stored_blocks import StoredBlocks
from tests.drafters.draft_model_sessions import PROMPT, opened, same, source_of, wanted
from tests.kernels.kernels_here import needs_kernels
from tests.tiny_models.draft_models import make_tiny_draft
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_head, make_medusa, make_streams

LOADERS: dict[str, tuple[Callable[[Path, Path], Path], Callable[[Path, Path], nn.Module]]] = {
    "fspad": (lambda target, folder: make_head(target, folder, "fspad"), load_head),
    "eagle3": (lambda target, folder: make_head(target, folder, "eagle3"), load_head),
    "medusa": (make_medusa, load_medusa),
    "streaming": (make_streams, load_streams),
}


def in_blocks(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    quantize_folder(out)
    assert not (out / "model.safetensors").exists()
    return out


@pytest.mark.parametrize("family", LOADERS)
def test_each_kind_of_checkpoint(tmp_path: Path, family: str) -> None:
    target = make_tiny_model(tmp_path / "target", hidden_size=128)
    make, load = LOADERS[family]
    whole = make(target, tmp_path / "whole")
    blocks = in_blocks(whole, tmp_path / "blocks")
    with WeightFiles(blocks) as files:
        assert any(isinstance(files.get(name), StoredBlocks) for name in files.names)
    assert (blocks / "blocks.safetensors").stat().st_size < 0.65 * (whole / "model.safetensors").stat().st_size
    one, other = load(whole, target).state_dict(), load(blocks, target).state_dict()
    assert list(one) == list(other)
    for name, exact in one.items():
        # Of 127 steps up to a block's largest number, an error of at most half of one; its scale is rounded, too.
        assert (other[name] - exact).abs().max() <= exact.abs().max() / 127 * 0.6, name
    left, right = inspect(whole, target), inspect(blocks, target)
    assert (left.source, left.layers, left.numbers) == (right.source, right.layers, right.numbers)


@needs_kernels
def test_a_draft_model_computes_with_its_blocks(tiny_model: Path, tmp_path: Path) -> None:
    """The same drafts as from the floats that the blocks stand for."""
    blocks = in_blocks(make_tiny_draft(tiny_model, tmp_path / "draft"), tmp_path / "blocks")
    floats = tmp_path / "floats"
    shutil.copytree(tmp_path / "draft", floats)
    with WeightFiles(blocks) as files:
        held = {name: files.get(name) for name in files.names}
    numbers = {name: each.float() if isinstance(each, StoredBlocks) else each for name, each in held.items()}
    before = load_file(floats / "model.safetensors")
    assert any(not torch.equal(before[name], each) for name, each in numbers.items())
    save_file(
        {name: each.contiguous() for name, each in numbers.items()}, floats / "model.safetensors", metadata={"format": "pt"}
    )
    (left,), (right,) = (
        source.draft([wanted(opened(source, PROMPT), 12)])
        for source in (source_of(tiny_model, blocks, draft_kernels=by_kernels), source_of(tiny_model, floats))
    )
    assert left is not None and right is not None and len(left) and same(left, right)
    # Torch computes with the floats.
    by_torch = source_of(tiny_model, blocks)
    (left,) = by_torch.draft([wanted(opened(by_torch, PROMPT), 12)])
    assert left is not None and same(left, right)
