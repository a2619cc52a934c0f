"""A tiny gpt-oss as it is published, its experts in MXFP4, and the float model that it stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.tiny_models.quantised import Weights, configure


def make_gpt_oss(dense: Path, folder: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with the tokeniser of ``dense`` and random experts in MXFP4, and its float model; returns both folders."""
    settings = json.loads((dense / "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": settings["vocab_size"]}
    torch.manual_seed(0)
    config = GptOssConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, sliding_window=64, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    stored: Weights = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = parameter.detach()
            continue
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data = convert_moe_packed_tensors(blocks, scales).float()
    for kind in ("plain", "quantised"):
        shutil.copytree(dense, folder / kind)
        model.save_pretrained(folder / kind)
    save_file(stored, folder / "quantised" / "model.safetensors", metadata={"format": "pt"})
    configure(folder / "quantised", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder / "quantised", folder / "plain"
