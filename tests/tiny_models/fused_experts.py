"""Mixtures whose files hold one FP8 tensor for all experts of a layer, and the float models that they stand for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.tiny_models.quantised import Made, Weights, configure
from tests.tiny_models.tiny import make_tiny_model

# Two ranks have whole vectors of all of them.
_SIZES = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2,
    "head_dim": 32,
}  # fmt: skip
_LLAMA_4 = {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 32}


def _model(kind: str, vocabulary: int) -> PreTrainedModel:
    sizes = {**_SIZES, "vocab_size": vocabulary}
    if kind == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=6, moe_intermediate_size=64))
    if kind == "gpt_oss":
        return GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, sliding_window=64))
    return Llama4ForCausalLM(Llama4TextConfig(**{**sizes, **_LLAMA_4}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Which numbers of an expert's matrix share a scale.

    Attributes:
        block: rows and columns of the stored tensor, where that is ``weight_block_size``.
        each: which dimensions of the matrix have scales of their own.
        halves: of gates and ups there are two, as transformers stores them.
    """

    block: tuple[int, int] | None = None
    each: tuple[int, ...] = ()
    halves: bool = False


SCALES: Mapping[str, Scales] = {
    "blocks": Scales(block=(32, 32)),
    "rows": Scales(each=(1,)),
    "experts": Scales(),
    "halves": Scales(halves=True),
    # Of tensors with inputs first.
    "columns": Scales(each=(2,)),
}


def _quantised(weight: torch.Tensor, how: Scales, name: str) -> Made:
    """Codes and scales of [experts, rows, columns], and the numbers that transformers makes of them."""
    _, rows, columns = weight.shape
    if how.block is not None:
        block = how.block
    else:
        shared = rows // 2 if how.halves and name.endswith("gate_up_proj") else rows
        block = (1 if 1 in how.each else shared, 1 if 2 in how.each else columns)
    parts = weight.unflatten(2, (-1, block[1])).unflatten(1, (-1, block[0]))
    scales = parts.abs().amax((2, 4)) / 448
    codes = (parts / scales[:, :, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scales}, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)


def make_fused(kind: str, scales: str, folder: Path) -> tuple[Path, Path]:
    """A random mixture of this type; returns its folder and the float model's."""
    made = make_tiny_model(folder / "tokens")
    torch.manual_seed(0)
    model = _model(kind, AutoModelForCausalLM.from_pretrained(made).config.vocab_size)
    stored: Weights = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() != 3:
            stored[name] = parameter.detach()
            continue
        parts, parameter.data = _quantised(parameter.detach() + 0.01, SCALES[scales], name)
        stored |= {f"{name}{part}": tensor for part, tensor in parts.items()}
    for name in ("plain", "quantised"):
        shutil.copytree(made, folder / name)
        model.save_pretrained(folder / name)
    for shard in (folder / "quantised").glob("*.safetensors*"):
        shard.unlink()
    save_file(stored, folder / "quantised" / "model.safetensors", metadata={"format": "pt"})
    block = SCALES[scales].block
    configure(folder / "quantised", quantization_config={"quant_method": "fp8", "weight_block_size": block})
    return folder / "quantised", folder / "plain"
