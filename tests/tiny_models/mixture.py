"""A dense model as a mixture of experts that are all alike: it says what the dense one says, up to rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def make_mixture(dense: Path, folder: Path, experts: int = 4) -> Path:
    """Write the Llama in ``dense`` to ``folder`` as a Mixtral whose experts are copies of its MLP, behind random routers."""
    shutil.copytree(dense, folder)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    model = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32)
    settings = model.config.to_dict()
    for name in ("model_type", "architectures"):
        settings.pop(name)
    config = MixtralConfig(**settings, num_local_experts=experts, num_experts_per_tok=2, sliding_window=None)
    torch.manual_seed(0)
    mixture = MixtralForCausalLM(config)
    state = model.state_dict()
    for number, layer in enumerate(model.model.layers):
        place, mlp = f"model.layers.{number}.mlp", layer.mlp
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        state[f"{place}.experts.gate_up_proj"] = gate_up.expand(experts, -1, -1)
        state[f"{place}.experts.down_proj"] = mlp.down_proj.weight.expand(experts, -1, -1)
        state[f"{place}.gate.weight"] = torch.randn(experts, config.hidden_size)
        for name in ("gate_proj", "up_proj", "down_proj"):
            del state[f"{place}.{name}.weight"]
    mixture.load_state_dict(state)
    mixture.save_pretrained(folder)
    return folder
