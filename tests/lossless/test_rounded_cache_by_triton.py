"""A target that keeps keys and values in eight bits by Triton's kernels, in its interpreter: trees change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from services.verifier.attention.on_gpu import GpuAttention
from services.verifier.config import KVCacheDtype, TargetConfig
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix
from tests.kernels.triton_interpreter import hopper
from tests.lossless.test_rounded_on_gpus import SMALL, row_kernels, rows
from tests.lossless.test_triton_ranks import SIZES, means, parts_of, passes, together
from tests.tiny_models.tiny import make_tiny_model

pytestmark = pytest.mark.exhaustive

ON_GPUS = replace(means("float32"), attention=GpuAttention(refusal=lambda *_: ""), pack=row_kernels)


def config(model: Path, cache: KVCacheDtype = "fp8") -> TargetConfig:
    return TargetConfig(
        model_path=str(model), kv_cache_tokens=512, max_model_len=128, weights="float32", threads=1, kv_cache_dtype=cache
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, **SMALL)


def drafted(target: TransformersTarget) -> torch.Tensor:
    """Rows of a tree, of a path that is kept, and behind a kept prefix, compared with a prompt's, which come back."""
    text = [at * 37 % target.vocab_size for at in range(72)]
    assert target.open("whole", 80) and target.open("tree", 80, Prefix(tokens=tuple(text), tenant="one"))
    whole = target.forward([rows("whole", 0, text)])[0]
    target.forward([rows("tree", 0, text[:18])])
    target.keep("tree", 0, range(18))
    branch = rows("tree", 18, [text[18], text[19], 7, text[20]], (-1, -1, 0))
    made = target.forward([rows("whole", 72, [5]), branch])[1]
    assert torch.equal(made[[0, 1, 3]], whole[18:21])
    # The path's second row lies behind another node's.
    target.keep("tree", 18, [0, 1, 3])
    assert torch.equal(target.forward([rows("tree", 21, text[21:71])])[0], whole[21:71])
    target.keep("tree", 21, range(50))
    target.close("tree")
    assert target.open("again", 80, Prefix(tokens=tuple(text), tenant="one"))
    assert target.computed("again") == BLOCK
    assert torch.equal(target.forward([rows("again", BLOCK, text[BLOCK:])])[0], whole[BLOCK:])
    target.close("again")
    target.close("whole")
    return whole


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in buckets"])
def test_trees_have_the_bits_of_plain_decoding(model: Path, captured: bool) -> None:
    with hopper():
        target = TransformersTarget(config(model), means=ON_GPUS)
        assert target.exact and target.pool.rounded and target.pool.keys[0].dtype == torch.uint8
        assert all(isinstance(layer.forward, RowDecoderLayer) for layer in target._part.model.get_decoder().layers)
        assert target.weights.rounded_cache == "floats of 8 bits with a scale for each row and head"
        if captured:
            # As on a GPU, but launched one by one.
            target._part._graphs = target._part._captured(target._config)
        whole = drafted(target)
        target.shutdown()
        if not captured:
            # It is another model than the one whose cache is not rounded, and near it.
            other = TransformersTarget(config(model, "auto"), means=ON_GPUS)
            plain = drafted(other)
            other.shutdown()
            assert not torch.equal(plain, whole)
            assert float(torch.corrcoef(torch.stack([plain.flatten(), whole.flatten()]))[0, 1]) > 0.9


def test_scales_that_stay_behind_are_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = KVPool._make

    def without(self: KVPool, blocks: int) -> None:
        make(self, blocks)
        self._alike = [pair for pair in self._alike if not self.rounded or pair[0].dtype == torch.uint8]

    monkeypatch.setattr(KVPool, "_make", without)
    with hopper():
        target = TransformersTarget(config(model), means=ON_GPUS)
        with pytest.raises(AssertionError):
            drafted(target)
        target.shutdown()


def test_the_same_bits_from_two_ranks(tmp_path: Path) -> None:
    def of(part: ModelSlice) -> torch.Tensor:
        part.round_cache()
        return passes(part)

    folder = make_tiny_model(tmp_path, **SIZES)
    (whole,) = together(parts_of(folder, 1, cache="fp8"), of)
    assert all(torch.equal(made, whole) for made in together(parts_of(folder, 2, cache="fp8"), of))
    assert not torch.equal(whole, together(parts_of(folder, 1), passes)[0])


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_passes_are_captured_over_the_cache_that_serves(
    model: Path, cache: KVCacheDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs read where keys and values lie: they are captured once, when these are rounded if they are to be."""
    found: list[Any] = []
    monkeypatch.setattr(ModelSlice, "_capture", lambda part: found.append(part.pool.rounded))
    with hopper():
        TransformersTarget(config(model, cache), means=ON_GPUS).shutdown()
    assert found == [cache == "fp8"]
