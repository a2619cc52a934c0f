"""LoRA adapters in PEFT's format for tests: random weights for named modules of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OF_LINEAR, OF_EMBEDDING = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WITH_ENDS = (*ALL, "embed_tokens", "lm_head")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """An adapter of all modules of ``model`` whose names end in ``targets``.

    Args:
        ranks: of single modules, by name; told in ``rank_pattern``.
        size: of its weights; large enough that answers differ from the base model's.
        fields: of its configuration, beside those that PEFT always writes.
    """
    generator = torch.Generator().manual_seed(seed)
    # Its shapes alone: what its generation_config.json says must not matter.
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tensors: dict[str, torch.Tensor] = {}
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in targets:
            own = (ranks or {}).get(name, rank)
            outputs, inputs = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.T.shape
            down, up = (
                torch.randn(shape, generator=generator).mul(size).to(dtype) for shape in ((own, inputs), (outputs, own))
            )
            of_down, of_up = OF_EMBEDDING if isinstance(module, torch.nn.Embedding) else OF_LINEAR
            tensors |= {f"base_model.model.{name}.{of_down}": down, f"base_model.model.{name}.{of_up}": up}
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "inference_mode": True,
        "r": rank, "lora_alpha": 8, "lora_dropout": 0.1, "bias": "none", "target_modules": list(targets),
        "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None,
        "init_lora_weights": True, "rank_pattern": dict(ranks or {}), "alpha_pattern": {},
    }  # fmt: skip
    write_config(folder, {**told, **fields})
    return folder


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write ``adapter_config.json``."""
    (folder / CONFIG).write_text(json.dumps(fields, indent=2))


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of ``adapter_config.json``."""
    fields: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return fields
