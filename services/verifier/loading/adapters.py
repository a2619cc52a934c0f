"""Adapters for architectures whose attention layers do not call transformers' attention interface.

An adapter computes queries, keys and values as the architecture does, with the module's own layers, and passes them to
``attend``. It replaces a method of the module, only on the model that is served.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.codegen import modeling_codegen as codegen
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.mpt import modeling_mpt as mpt

from services.verifier.attention.calls import NAME, Bias, attend
from services.verifier.attention.masks import Sight

# GPT-J and Codegen call transformers' attention interface themselves since 5.24.
_GPTJ_CALLS_THE_INTERFACE = not hasattr(gptj.GPTJAttention, "_attn")


def register() -> None:
    """Allow our attention in architectures that choose a class by the name of the attention."""
    falcon.FALCON_ATTENTION_CLASSES[NAME] = falcon.FalconAttention
    gpt_neo.GPT_NEO_ATTENTION_CLASSES[NAME] = gpt_neo.GPTNeoSelfAttention
    if not _GPTJ_CALLS_THE_INTERFACE:
        gptj.GPTJ_ATTENTION_CLASSES[NAME] = gptj.GPTJAttention


def install(model: nn.Module, positions: int, device: torch.device) -> None:
    """Adapt the attention layers that need it. Must run before the linear layers are replaced.

    Args:
        positions: length of the longest possible request, in tokens.
        device: where the model will be.
    """
    biases: dict[type[nn.Module], Bias | None] = {}
    for module in model.modules():
        if type(module) is falcon.FalconLinear:
            # A subclass that computes the same product.
            module.__class__ = nn.Linear
        if (adapter := _ADAPTERS.get(type(module))) is None:
            continue
        name, method, bias_of = adapter
        if bias_of is not None and type(module) not in biases:
            # The bias is the same in all layers.
            biases[type(module)] = bias_of(module, positions, device)
        module.outrider_bias = biases.get(type(module))  # type: ignore[assignment]
        setattr(module, name, MethodType(method, module))


def exact_attention(config: PreTrainedConfig) -> str:
    """Which of transformers' own attentions computes what the model means.

    This is eager attention, except for falcon with alibi: there, eager attention of transformers 5.24 adds the bias twice,
    while the other implementations and the paper add it once.
    """
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


def inputs_of(module: nn.Module, positions: torch.Tensor) -> dict[str, Any]:
    """Further inputs of a model or decoder besides tokens or hidden states; ``positions`` is [1, rows]."""
    forward = module.forward
    return {"position_ids": positions} if _takes_positions(getattr(forward, "__func__", forward)) else {}


@functools.cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "position_ids" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, scale: float
) -> torch.Tensor:
    """[1, rows, heads * size] from query, key and value, [1, heads, rows, size] each."""
    made, _ = attend(module, query, key, value, mask, scaling=scale, outrider_bias=module.outrider_bias)
    return made.flatten(2)


def _bloom_bias(module: Any, positions: int, device: torch.device) -> Bias:
    seen = torch.ones(1, positions, dtype=torch.float32, device=device)
    return Bias(table=bloom.build_alibi_tensor(seen, module.num_heads, torch.float32)[:, 0].contiguous())


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *, attention_mask: object, **_: object
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    made = _attend(self, query, key, value, attention_mask, self.inv_norm_factor)
    return self.dense(made) + residual, None


def _falcon_bias(module: Any, positions: int, device: torch.device) -> Bias | None:
    if not module.config.alibi:
        return None
    seen = torch.ones(1, positions, dtype=torch.int64, device=device)
    # falcon adds the bias before it scales the scores.
    alibi = falcon.build_alibi_tensor(seen, module.num_heads, torch.float32)[:, 0]
    return Bias(table=alibi * module.inv_norm_factor)


def _falcon(
    self: Any,
    hidden_states: torch.Tensor,
    *,
    attention_mask: object,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: object,
) -> tuple[torch.Tensor, None]:
    heads = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (each.transpose(1, 2) for each in heads)
    if self.outrider_bias is None:
        query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    # In the newer decoder, a shared key is repeated for each of its heads.
    share = key.shape[1] // self.num_kv_heads
    made = _attend(self, query, key[:, ::share], value[:, ::share], attention_mask, self.inv_norm_factor)
    return self.dense(made), None


def _mpt_bias(module: Any, positions: int, device: torch.device) -> Bias:
    # The bias depends on the distance; the last column is for the query's own position.
    table = mpt.build_mpt_alibi_tensor(module.n_heads, positions, device=device)[:, 0]
    return Bias(table=table.flip(1).float().contiguous(), by_distance=True)


def _mpt(self: Any, hidden_states: torch.Tensor, *, attention_mask: object, **_: object) -> tuple[torch.Tensor, None]:
    joint = self.Wqkv(hidden_states)
    if self.clip_qkv:
        joint = joint.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (each.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for each in joint.chunk(3, 2))
    return self.out_proj(_attend(self, query, key, value, attention_mask, self.softmax_scale)), None


def _mpt_model(self: Any, input_ids: torch.Tensor | None = None, **given: Any) -> Any:
    if self.config._attn_implementation == NAME:
        # MptModel converts its mask even if it has made none; a mask that is given is passed on.
        given["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device=self.device)
    return mpt.MptModel.forward(self, input_ids, **given)


def _gptj(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object = None
) -> tuple[torch.Tensor, None]:
    # Codegen rotates queries and keys in float32, and caches keys in the type of the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    made, _ = attend(self, query, key, value, attention_mask, scaling=1 / float(self.scale_attn))
    return made.transpose(1, 2), None


def _gpt_neo(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object = None
) -> tuple[torch.Tensor, None]:
    if self.attention_type == "local" and isinstance(attention_mask, Sight):
        attention_mask = Sight(window=self.config.window_size)
    made, _ = attend(self, query, key, value, attention_mask, scaling=1.0)
    return made.transpose(1, 2), None


# By class of module: the method to replace, its replacement, and what gives the bias that the module adds to scores.
_ADAPTERS: dict[type[nn.Module], tuple[str, Callable[..., Any], Callable[[Any, int, torch.device], Bias | None] | None]] = {
    bloom.BloomAttention: ("forward", _bloom, _bloom_bias),
    falcon.FalconAttention: ("forward", _falcon, _falcon_bias),
    mpt.MptAttention: ("forward", _mpt, _mpt_bias),
    mpt.MptModel: ("forward", _mpt_model, None),
    gpt_neo.GPTNeoSelfAttention: ("_attn", _gpt_neo, None),
}
if not _GPTJ_CALLS_THE_INTERFACE:
    _ADAPTERS |= dict.fromkeys((gptj.GPTJAttention, codegen.CodeGenAttention), ("_attn", _gptj, None))
