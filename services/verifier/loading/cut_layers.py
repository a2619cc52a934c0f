"""Cuts a model without weights down to one rank's shard of it: heads, columns of products, and part of the vocabulary.

Of a mixture every rank holds all experts, and of each some columns of its products; routers, and the products that latent
attention has before its heads, are small and whole in every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.rounded_inputs import RoundedLinear
from services.model_files.weights.stored_blocks import StoredLinear
from services.verifier.kernels.experts import chosen_by_row
from services.verifier.kernels.sharded_layers import ShardedEmbedding, ShardedLinear, share_experts
from services.verifier.loading.part_sizes import Exchanged, Uncut
from services.verifier.loading.rank_sizes import check_rank_sizes
from services.verifier.stages.stage_ranks import Cut, StageRanks
from speculation.errors import ConfigurationError

# Types of models whose layers are cut, each tested to give the same bits. What others do between their products need not
# work on shards, such as a norm of all heads, and a start compares what is cut with itself, not with the whole model.
TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
# Of attention: what is cut by heads of keys, by heads of queries, and by outputs. Latent attention has none of the former.
_KEYS, _HEADS = ("k_proj", "v_proj"), ("q_proj", "q_b_proj", "kv_b_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
# What gets rows in shards.
_GATHERING = ("o_proj", "down_proj")


def check_cut(model_type: str, ranks: int) -> None:
    """Check that models of this type can be cut.

    Raises:
        ConfigurationError: they cannot; names those that can.
    """
    if model_type not in TYPES:
        raise ConfigurationError(
            f"models of the type {model_type} are not cut so far ({', '.join(TYPES)} are); use 1, and stages",
            field="verifier.tensor_parallel_size",
            value=ranks,
        )


def cut_layers(model: PreTrainedModel, shards: StageRanks) -> dict[str, Cut]:
    """Make the layers of a model without weights as small as one rank's; returns which part each weight is, by its name.

    Raises:
        ConfigurationError: it cannot be cut, or not into so many; says what can be.
    """
    check_cut(model.config.model_type, shards.count)
    text, found = model.config.get_text_config(), dict[str, Cut]()
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    check_rank_sizes(shards.count, text.to_dict())
    decoder, count, index = model.get_decoder(), shards.count, shards.index
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Where there are fewer key heads than ranks, several ranks hold the same one.
    first, some = index * kv_heads // count, max(1, kv_heads // count)
    keys = Cut(begin=first * head_size, end=(first + some) * head_size, whole=kv_heads * head_size)
    prefix = f"{model.base_model_prefix}."
    for number, layer in enumerate(decoder.layers):
        attention, place = layer.self_attn, f"{prefix}layers.{number}"
        if hasattr(attention, "k_proj"):
            attention.num_key_value_groups = heads // count // some
        for name in (*_KEYS, *_HEADS):
            if getattr(attention, name, None) is not None:
                found |= _cut(attention, name, f"{place}.self_attn.{name}", shards, keys if name in _KEYS else None)
        if "sinks" in attention._parameters:
            found |= _cut_parameter(attention, "sinks", f"{place}.self_attn.sinks", shards, axis=0)
        for part, module in _feed_forwards(layer):
            for name in _FEED_FORWARD:
                found |= _cut(module, name, f"{place}.{part}.{name}", shards, None)
        if (experts := _experts_of(layer)) is not None:
            found |= _cut_experts(experts, f"{place}.mlp.experts", shards)
    if isinstance(decoder.embed_tokens, nn.Embedding):
        found |= _cut(decoder, "embed_tokens", f"{prefix}embed_tokens", shards, None)
    if not isinstance(model.lm_head, nn.Identity):
        found |= _cut(model, "lm_head", "lm_head", shards, None)
    return found


def gather_between(model: PreTrainedModel, shards: StageRanks) -> None:
    """Let the layers of a model that has been cut, and read, exchange what they make with the other ranks."""
    decoder = model.get_decoder()
    for layer in decoder.layers:
        for parent in (layer.self_attn, *(module for _, module in _feed_forwards(layer))):
            for name in _GATHERING:
                if hasattr(parent, name):
                    setattr(parent, name, ShardedLinear(getattr(parent, name), shards, gathers=True))
        if (experts := _experts_of(layer)) is not None:
            share_experts(experts, shards)
    if isinstance(decoder.embed_tokens, nn.Embedding):
        decoder.embed_tokens = ShardedEmbedding(decoder.embed_tokens, shards)
    if isinstance(model.lm_head, (nn.Linear, StoredLinear, RoundedLinear)):
        model.lm_head = ShardedLinear(model.lm_head, shards, gathers=False)


def gathers_of(model: PreTrainedModel) -> Exchanged:
    """What ``gather_between`` lets the ranks of a model without weights exchange; nothing if it is not of ``TYPES``.

    Args:
        model: not cut, whose mixtures have noted how many experts a row chooses.
    """
    if model.config.model_type not in TYPES:
        return Exchanged()
    text, times, numbers = model.config.get_text_config(), 0, 0
    for layer in model.get_decoder().layers:
        parents = (layer.self_attn, *(module for _, module in _feed_forwards(layer)))
        gathering = [getattr(parent, name) for parent in parents for name in _GATHERING if hasattr(parent, name)]
        # Before and behind each.
        times += 2 * len(gathering)
        numbers += sum(each.in_features + each.out_features for each in gathering)
        if (experts := _experts_of(layer)) is not None:
            inner, outer = experts.down_proj.shape[1:] if experts.is_transposed else reversed(experts.down_proj.shape[1:])
            times, numbers = times + 2, numbers + (chosen_by_row(experts) or 0) * inner + outer
    # Embeddings, and the output layer's logits.
    return Exchanged(times=times + 2, numbers=numbers + text.vocab_size, repeated=text.hidden_size)


def uncut_of(model: PreTrainedModel) -> Uncut:
    """What the ranks of a model without weights do not share out evenly; nothing if it cannot be cut.

    Cuts the model, which is of no further use.
    """
    if model.config.model_type not in TYPES:
        return Uncut()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    try:
        cut = cut_layers(model, StageRanks(0, _fewest_ranks(model.config.get_text_config())))
    except ConfigurationError:
        return Uncut()
    layers, inside = model.get_decoder().layers, f"{model.base_model_prefix}.layers."
    whole = {name: size for name, size in sizes.items() if name not in cut}
    in_layers = sum(size for name, size in whole.items() if name.startswith(inside))
    keys = sum(size for name, size in sizes.items() if any(f".{key}." in name for key in _KEYS))
    return Uncut(per_layer=in_layers // len(layers), keys=keys // len(layers), others=sum(whole.values()) - in_layers)


def _fewest_ranks(text: Any) -> int:
    """The fewest ranks, but one, that have equal shares; 2 where none has."""
    for count in range(2, text.num_attention_heads + 1):
        try:
            check_rank_sizes(count, text.to_dict())
        except ConfigurationError:
            continue
        return count
    return 2


def _feed_forwards(layer: Any) -> Iterator[tuple[str, Any]]:
    """A layer's dense parts, by their names in it: all of what is behind attention, or experts that get every row."""
    for part, module in (("mlp", layer.mlp), ("mlp.shared_experts", getattr(layer.mlp, "shared_experts", None))):
        if hasattr(module, "down_proj"):
            yield part, module


def _experts_of(layer: Any) -> Any | None:
    return getattr(layer.mlp, "experts", None)


def _cut_experts(experts: Any, place: str, shards: StageRanks) -> Iterator[tuple[str, Cut]]:
    """Replace the weights of all experts by smaller ones: the same outputs of each, of gates and ups those that belong
    together.

    Raises:
        ConfigurationError: ranks would get unequal parts.
    """
    axis = 2 if experts.is_transposed else 1
    apart = 2 if experts.is_concatenated else 1
    for name, pieces, unit in (("gate_up_proj", apart, 2 // apart), ("down_proj", 1, 1)):
        yield from _cut_parameter(experts, name, f"{place}.{name}", shards, axis, pieces, unit)
        if experts.has_bias:
            yield from _cut_parameter(experts, f"{name}_bias", f"{place}.{name}_bias", shards, 1, pieces, unit)


def _cut_parameter(
    parent: nn.Module, name: str, place: str, shards: StageRanks, axis: int, pieces: int = 1, unit: int = 1
) -> Iterator[tuple[str, Cut]]:
    """Replace a parameter by a smaller one on the meta device.

    Args:
        pieces: see ``Cut``.
        unit: how many numbers stay together.

    Raises:
        ConfigurationError: there are no equal shares.
    """
    whole = parent.get_parameter(name)
    size = whole.shape[axis]
    if size % (shards.count * pieces * unit):
        raise _no_shares(place, size // unit, shards)
    each = size // pieces // shards.count
    cut = Cut(begin=shards.index * each, end=(shards.index + 1) * each, whole=size, axis=axis, pieces=pieces)
    shape = list(whole.shape)
    shape[axis] = pieces * each
    setattr(parent, name, nn.Parameter(torch.empty(shape, device="meta", dtype=whole.dtype), requires_grad=False))
    yield place, cut


def _no_shares(place: str, rows: int, shards: StageRanks) -> ConfigurationError:
    return ConfigurationError(
        f"{place} has {rows} rows, which have no equal shares", field="verifier.tensor_parallel_size", value=shards.count
    )


def _cut(parent: nn.Module, name: str, place: str, shards: StageRanks, cut: Cut | None) -> Iterator[tuple[str, Cut]]:
    """Replace a layer by a smaller one on the meta device; by default all ranks get as much.

    Raises:
        ConfigurationError: they cannot; a configuration may call its sizes by other names than are checked before.
    """
    layer = getattr(parent, name)
    whole, other = layer.weight.shape
    each, left = divmod(whole, shards.count)
    if cut is None and left:
        raise _no_shares(place, whole, shards)
    cut = cut or Cut(begin=shards.index * each, end=(shards.index + 1) * each, whole=whole)
    size = cut.end - cut.begin
    made: nn.Module
    if isinstance(layer, nn.Embedding):
        made = nn.Embedding(size, other, device="meta", dtype=layer.weight.dtype)
    else:
        made = nn.Linear(other, size, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype)
    setattr(parent, name, made)
    return ((f"{place}.{own}", cut) for own, _ in made.named_parameters())
