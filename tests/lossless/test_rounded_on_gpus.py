"""Checkpoints whose layers round what enters them, by our kernels for GPUs in Triton's interpreter: trees change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton")
from services.model_files.weights.rounded_inputs import round_by, roundings_of
from services.verifier.attention.on_gpu import GpuAttention
from services.verifier.checks.exactness import is_exact
from services.verifier.config import TargetConfig
from services.verifier.kernels import gpu_choice
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.loading.load_model import load_whole
from services.verifier.model.means import TargetMeans
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.kernels.triton_interpreter import hopper
from tests.lossless.test_triton_ranks import SIZES, parts_of, passes, together
from tests.tiny_models.quantised import ROUNDED, make_float_model, quantise

pytestmark = pytest.mark.exhaustive

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}


def row_kernels(model: PreTrainedModel, config: TargetConfig) -> Choice:
    fill_vectors()
    gpu_choice.put(model, "triton", torch.device(config.device))
    return Choice(linears="triton")


def rows(name: str, context: int, tokens: list[int], parents: tuple[int, ...] = ()) -> Rows:
    chosen = 1 + len(parents) if parents else len(tokens)
    return Rows(request_id=name, context=context, tokens=tuple(tokens), parents=parents, logits=chosen)


@pytest.mark.examples(2)
# Of each way of rounding one; ``test_rounded_rows`` has the bits of all.
@pytest.mark.parametrize(
    ("form", "captured"), [("w8a8_zeros", True), ("fp8_dynamic", False), ("fp8_block", True), ("nvfp4", False)]
)
def test_trees_have_the_bits_of_plain_decoding(form: str, captured: bool, tmp_path: Path) -> None:
    folder, _ = quantise(make_float_model(tmp_path / "float", **SMALL), tmp_path, ROUNDED[form])
    config = TargetConfig(model_path=str(folder), kv_cache_tokens=256, max_model_len=128, weights="float32", threads=1)
    means = TargetMeans(attention=GpuAttention(refusal=lambda *_: ""), pack=row_kernels)
    with hopper():
        target = TransformersTarget(config, means=means)
        assert target.exact
        model = target._part.model
        # Whole layers are left to modules, since queries, keys and values are products of their own.
        assert len(roundings_of(model)) == 7
        assert not any(isinstance(layer.forward, RowDecoderLayer) for layer in model.get_decoder().layers)
        if captured:
            target._part._graphs = target._part._captured(target._config)
        text = [at * 37 % target.vocab_size for at in range(22)]
        assert target.open("whole", 30) and target.open("tree", 30)
        whole = target.forward([rows("whole", 0, text)])[0]
        reference = load_whole(config)
        reference.set_attn_implementation("eager")
        # Last bits move a number to the next code in few rows.
        off = (whole - reference(torch.tensor([text])).logits[0]).abs().amax(-1) / whole.abs().max()
        assert off.quantile(0.5) < 1e-5 and off.max() < 0.1
        for end in (3, 18):
            target.forward([rows("tree", 0, text[:end])])
            branch = rows("tree", end, [text[end], text[end + 1], 7, text[end + 2]], (-1, -1, 0))
            made = target.forward([rows("whole", 22, [5]), branch])[1]
            assert torch.equal(made[[0, 1, 3]], whole[end : end + 3])
        # A scale for all rows is seen, also by the check at the start.
        if form in ("w8a8", "fp8_dynamic"):
            round_by(model, lambda how, given: how(given.reshape(1, -1)).reshape(given.shape))
            assert not is_exact(target)
        target.shutdown()


@pytest.mark.parametrize("form", ["w8a8_zeros", "fp8_block"])
def test_the_same_bits_from_two_ranks(form: str, tmp_path: Path) -> None:
    folder, _ = quantise(make_float_model(tmp_path / "float", **SIZES), tmp_path, ROUNDED[form])
    (whole,) = together(parts_of(folder, 1), passes)
    parts = parts_of(folder, 2)
    assert all(len(roundings_of(part.model)) == 7 for part in parts)
    assert all(torch.equal(made, whole) for made in together(parts, passes))
