"""Tiny Gemma 4 targets and assistants, written by transformers, and what transformers' own assistant says."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

from speculation.types import Features
from tests.tiny_models.tiny import make_tiny_tokenizer

VOCABULARY, HIDDEN, WINDOW = 320, 64, 8
SLIDING, FULL = "sliding_attention", "full_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
}
# Of the targets, by a name for it: the fields of its language model.
TARGETS: dict[str, dict[str, Any]] = {
    # As E2B and E4B: later layers share keys, and every layer reads embeddings of its own.
    "shared": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
    # As 31B: values are keys where attention is full, which has heads of another number.
    "one matrix": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # As 12B.
    "unified": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # As 26B-A4B.
    "experts": {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
_WITHOUT_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}


@dataclass(frozen=True)
class Pair:
    """An assistant and its target, in folders of transformers' form."""

    folder: Path
    target: Path

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.target, attn_implementation="eager").eval()

    @cached_property
    def theirs(self) -> Any:
        kind = json.loads((self.folder / "config.json").read_text())["model_type"]
        return _assistant_of(kind).from_pretrained(self.folder, attn_implementation="eager").eval()

    def change(self, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Change fields of config.json (those of its text_config as ``text.NAME``), and tensors; None: left out."""
        config = json.loads((self.folder / "config.json").read_text())
        for name, value in fields.items():
            (config["text_config"] if name.startswith("text.") else config)[name.removeprefix("text.")] = value
        (self.folder / "config.json").write_text(json.dumps(config))
        held: dict[str, torch.Tensor | None] = {**load_file(self.folder / "model.safetensors"), **tensors}
        save_file({name: each for name, each in held.items() if each is not None}, self.folder / "model.safetensors")

    @torch.no_grad()
    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> Features:
        """The target's states at all positions, as a verifier sends them."""
        made = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
        rows = torch.cat([made[-1 if layer == -1 else layer + 1][0] for layer in layers], dim=-1)
        return Features(
            data=rows.numpy().tobytes(), rows=len(rows), width=rows.shape[1], dtype="float32", layers=tuple(layers)
        )

    @torch.no_grad()
    def along(self, tokens: Sequence[int], path: Sequence[int], without: Collection[int] = ()) -> list[torch.Tensor]:
        """Logits [V] behind a text and each of the tokens of a path, as transformers' candidate generator asks for them: one
        query for each, always at the position of the text's last token, whose keys nobody has made yet.

        Args:
            without: positions whose keys and values are left out.
        """
        made = self.model(
            torch.tensor([list(tokens[:-1])]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        left = [at for at in range(len(tokens) - 1) if at not in without]
        shared = {kind: (key[:, :, left], value[:, :, left]) for kind, (key, value) in made.shared_kv_states.items()}
        state, found = made.hidden_states[-1][:, -1:], []
        for token in (tokens[-1], *path):
            embedding = self.model.get_input_embeddings()(torch.tensor([[token]]))
            said = self.theirs(
                inputs_embeds=torch.cat((embedding, state), dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=shared,
            )
            state = said.last_hidden_state
            found.append(said.logits[0, 0])
        return found


def make_pair(folder: Path, target: str = "shared", *, ordered: bool = False, whole: bool = False) -> Pair:
    """Write both.

    Args:
        target: one of ``TARGETS``.
        ordered: whether the output layer looks through clusters.
        whole: whether the target is a model of pictures, too.
    """
    torch.manual_seed(5)
    kind = "gemma4_unified" if target == "unified" else "gemma4"
    kinds = [SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL]
    own = {**_SIZES, "hidden_size": HIDDEN, "num_hidden_layers": 6, "layer_types": kinds, **TARGETS[target]}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(f"{kind}_text", **own))
    if whole:
        model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=own, vision_config=_VISION))
    _spread(model)
    model.save_pretrained(folder / "target")
    make_tiny_tokenizer(folder / "target")
    layers = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 4}
    groups: dict[str, Any] = {name: own[name] for name in ("attention_k_eq_v", "num_global_key_value_heads") if name in own}
    text: dict[str, Any] = {**_SIZES, **layers, **groups, "hidden_size": 32, **_WITHOUT_PER_LAYER}
    config = AutoConfig.for_model(
        f"{kind}_assistant",
        text_config=AutoConfig.for_model(f"{kind}_text", **text),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    )
    assistant = _assistant_of(kind)(config)
    _spread(assistant)
    if ordered:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    assistant.save_pretrained(folder / "assistant")
    return Pair(folder / "assistant", folder / "target")


def _assistant_of(kind: str) -> Any:
    return transformers.Gemma4UnifiedAssistantForCausalLM if "unified" in kind else transformers.Gemma4AssistantForCausalLM


@torch.no_grad()
def _spread(model: Any) -> None:
    """Weights that tell positions and tokens apart: those that a new model begins with hardly attend at all."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "layer_scalar" in name or ("norm" in name and parameter.dim() == 1):
            parameter.uniform_(0.6, 1.4)
        elif parameter.dim() > 1 and "embed_tokens" not in name:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.normal_(std=0.3)


def edit(fields: Mapping[str, Any] | None = None, **tensors: torch.Tensor | None) -> Callable[[Pair], None]:
    """For ``Pair.change``; names of tensors with ``__`` for dots."""
    return lambda pair: pair.change(fields or {}, {name.replace("__", "."): each for name, each in tensors.items()})
