"""A target that brings an MTP layer along is served as if it had none, and the layer drafts for it: no token changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.model_files.mtp_layers import find_mtp
from tests.engine.layouts import in_one_process
from tests.lossless.test_where_models_draft import SAMPLING, answers, compare
from tests.servers.service import pipeline
from tests.tiny_models import mtp_layers as made


def without_mtp(target: Path, folder: Path) -> Path:
    """A copy of the target without its MTP layer."""
    shutil.copytree(target, folder)
    held = load_file(folder / "model.safetensors")
    found = find_mtp(held)
    assert found is not None
    save_file({name: each for name, each in held.items() if name not in found.every}, folder / "model.safetensors")
    return folder


@pytest.mark.examples(6)
@pytest.mark.parametrize("kind", ["qwen2", *(kind for kind in made.KINDS if kind != "qwen2")])
async def test_its_own_layer_drafts(tmp_path: Path, kind: str) -> None:
    target = made.make_of_kind(kind, tmp_path / "target").target
    with in_one_process():
        async with pipeline(without_mtp(target, tmp_path / "without"), "drafter.models=[]") as running:
            plain = [await answers(running, "autoregressive", sampling) for sampling in SAMPLING]
    async with pipeline(target, "router.strategy=mtp", "verifier.draft_deadline_s=10") as running:
        for strategy in ("mtp", "blend"):
            for sampling, expected in zip(SAMPLING, plain, strict=True):
                await compare(running, strategy, "mtp", sampling, expected)
        assert not running.verifier.loop.stats.drafts_malformed
