"""A dense Llama in other forms, which say what it says or something of their own, with real weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel


def make_untied(dense: Path, folder: Path) -> Path:
    """With an output layer of its own, which is half of another one: every row of it differs from the embedding's."""
    model = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32)
    own = model.lm_head.weight.detach() * 0.5 + 0.5 * model.lm_head.weight.detach().mean(0)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(own)
    return _save(model, dense, folder)


def make_windowed(dense: Path, folder: Path, window: int) -> Path:
    """With a sliding window: Mistral's layers are Llama's."""
    model = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32)
    settings = model.config.to_dict()
    for name in ("model_type", "architectures"):
        settings.pop(name)
    windowed = MistralForCausalLM(MistralConfig(**{**settings, "sliding_window": window}))
    windowed.load_state_dict(model.state_dict())
    return _save(windowed, dense, folder)


def _save(model: PreTrainedModel, dense: Path, folder: Path) -> Path:
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    model.save_pretrained(folder)
    return folder
