"""Stream rows in passes of our GPU kernels, through Triton's interpreter: no bit of another row changes, and they are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton")
from cluster.models.drafters import read_stream_weights
from services.verifier.attention.on_gpu import GpuAttention
from services.verifier.config import TargetConfig
from services.verifier.kernels import gpu_choice as gpu_kernels
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.triton import tree_pass as triton_pass
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer
from services.verifier.model import target as target_module
from services.verifier.model.means import TargetMeans
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.kernels.triton_interpreter import hopper
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_streams

IN_PASS = (2, 3)


def _row_kernels(model: PreTrainedModel, config: TargetConfig) -> Choice:
    gpu_kernels.put(model, "triton", torch.device(config.device))
    return Choice(linears="triton")


def rows_of(target: TransformersTarget, with_streams: bool) -> list[torch.Tensor]:
    """Logits of a tree across the border of a group of positions, beside another request and behind some padding."""
    ends = ((4,), (0, 2)) if with_streams else ((), ())
    for name in "ab":
        target.open(name, 160)
    target.forward([Rows(request_id="a", context=0, tokens=tuple(range(3, 17)), logits=0)])
    target.keep("a", 0, range(14))
    batch = [
        Rows(request_id="b", context=0, tokens=(5, 6, 7, 8, 9), logits=1, layers=IN_PASS, ends=ends[0]),
        Rows(request_id="a", context=14, tokens=(9, 3, 4, 1), parents=(-1, 0, -1), logits=4, layers=IN_PASS, ends=ends[1]),
    ]
    found = target.forward(batch)
    states = [state for name, own in zip("ba", ends, strict=True) for state in map(streams_of(target, name), own)]
    for name in "ab":
        target.close(name)
    return [*found, *states]


def streams_of(target: TransformersTarget, name: str) -> Callable[[int], torch.Tensor]:
    stream_rows = target.stream_rows
    assert stream_rows is not None
    return lambda row: stream_rows.states(name, row).clone()


@pytest.mark.exhaustive
def test_stream_rows_change_no_bit_and_are_those_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "target", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    weights = read_stream_weights(make_streams(model, tmp_path / "streams", layers=1, streams=2), model)
    config = TargetConfig(model_path=str(model), kv_cache_tokens=512, max_model_len=256, threads=1)
    on_cpu = TransformersTarget(config, None, weights)
    means = TargetMeans(attention=GpuAttention(refusal=lambda *_: ""), pack=_row_kernels)
    # What it checks is compared below.
    monkeypatch.setattr(target_module, "is_exact", lambda *_: True)
    with hopper():
        target = TransformersTarget(config, None, weights, means)
        part = target._part
        assert all(isinstance(layer.forward, RowDecoderLayer) for layer in part.model.get_decoder().layers)
        part._graphs = part._captured(config)
        found, plain = rows_of(target, True), rows_of(target, False)
        assert all(map(torch.equal, found[:2], plain))
        for mine, other in zip(found, rows_of(on_cpu, True), strict=True):
            assert torch.allclose(mine, other, atol=1e-3)
        # A stream row among the others' places: a planted fault.
        monkeypatch.setattr(triton_pass, "streams_last", lambda *given: right(*given)[::-1])
        wrong = rows_of(target, True)
        assert not all(map(torch.equal, wrong[:2], plain))
    on_cpu.shutdown()


right = triton_pass.streams_last
