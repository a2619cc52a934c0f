"""Whatever folder or file is given as a model: served as transformers computes it, or refused with one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import load
from cluster.models import resolve
from cluster.preflight import preflight
from services.router.tokens import Tokens
from services.verifier.config import TargetConfig
from services.verifier.target import TransformersTarget
from speculation.errors import ConfigurationError
from speculation.ports import Rows
from tests.damage import damage

FOLDERS, FILES, BATCH = 400, 100, 50
TEXT = tuple(range(5, 17))


def serve(model: Path, cache: Path) -> TransformersTarget:
    """As ``outrider serve`` does: what is checked beforehand, the tokeniser, the target."""
    settings = load(flags=[f"model={model}", "server.port=0", f"cache_dir={cache}"], environ={})
    preflight(settings)
    folder = resolve(str(model), cache, say=lambda _: None).path
    Tokens(str(folder)).encode("the quick fox")
    # Without kernels of our own, nothing is measured.
    return TransformersTarget(TargetConfig(model_path=str(folder), kv_cache_tokens=512, kernels="torch", threads=1))


def outcome(model: Path, cache: Path, what: str, **source: object) -> str | None:
    """The refusal, or None where the model is served; any other outcome fails, with ``what`` was damaged."""
    try:
        target = serve(model, cache)
    except ConfigurationError as error:
        told = str(error)
        assert "\n" not in told and 10 < len(told) < 700, f"{what}: {told}"
        return told
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert target.open("a", 64)
    served = target.forward([Rows(session_id="a", context=0, tokens=TEXT, logits=len(TEXT))])[0]
    where = str(model.parent) if source else str(model)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager", **source)
        reference = theirs(torch.tensor([TEXT])).logits[0].detach()
    except Exception as error:
        raise AssertionError(f"{what}: served, but transformers fails: {error}") from error
    assert torch.isfinite(served).all(), what
    assert torch.allclose(served, reference, rtol=1e-3, atol=2e-3), f"{what}: {(served - reference).abs().max()}"
    return None


@pytest.mark.parametrize(
    "first", [pytest.param(0), *(pytest.param(n, marks=pytest.mark.slow) for n in range(BATCH, FOLDERS, BATCH))]
)
def test_folders(first: int, tiny_model: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(first, first + BATCH):
        folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
        what = f"seed {seed}, {damage(folder, seed)}"
        refused += outcome(folder, tmp_path / "cache", what) is not None
        shutil.rmtree(folder)
    # Neither everything nor nothing.
    assert BATCH // 4 < refused < BATCH
