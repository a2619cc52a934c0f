"""Experts of a layer in one call of a kernel: the bits of a call for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.verifier.config import TargetConfig
from services.verifier.kernels.native import linear_kernel
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.lossless.hybrids import make_hybrid

LATER = ("lfm2_moe", "granitemoehybrid", "nemotron_h", "jamba")


def logits(folder: Path) -> torch.Tensor:
    """Of a prompt, a row and a tree."""
    target = TransformersTarget(TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, threads=1))
    assert target.open("text", 120)
    made = []
    for context, tokens, parents in ((0, range(1, 61), ()), (60, (9,), ()), (61, (3, 4, 5, 6), (-1, -1, 0))):
        given = tuple(tokens)
        rows = Rows(request_id="text", context=context, tokens=given, parents=parents, logits=len(given))
        made.append(target.forward([rows])[0])
    return torch.cat(made)


@pytest.mark.parametrize(
    # Without gates; with biases and inputs before outputs.
    "model_type",
    ["qwen3_next", "gpt_oss", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in LATER)],
)
def test_the_bits_of_a_call_for_each_expert(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("our kernels cannot be compiled here")
    folder, calls = make_hybrid(model_type, tmp_path / "model"), []
    run = linear_kernel._Linears.__call__

    def counted(self: linear_kernel._Linears, *given: torch.Tensor) -> torch.Tensor:
        calls.append(len(given[1]))
        return run(self, *given)

    monkeypatch.setattr(linear_kernel._Linears, "__call__", counted)
    together = logits(folder)
    assert max(calls) > 1
    calls.clear()
    monkeypatch.setattr(NativeLinear, "together", classmethod(lambda *_: None))
    assert torch.equal(logits(folder), together) and not calls
