"""Cuts a model without weights down to one rank's shard of it: heads, columns of products, and part of the vocabulary.

Of a mixture every rank holds all experts, and of each some columns of its products; routers, and the products that latent
attention has before its heads, are small and whole in every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.rounded_inputs import RoundedLinear
from services.model_files.weights.stored_blocks import StoredLinear
from services.verifier.kernels.experts import chosen_by_row
from services.verifier.kernels.sharded_layers import ShardedEmbedding, ShardedLinear, ShardedOutput, share_experts
from services.verifier.loading.part_sizes import Exchanged, Uncut
from services.verifier.loading.rank_sizes import check_rank_sizes
from services.verifier.stages.stage_ranks import Cut, StageRanks
from speculation.errors import ConfigurationError

# Types of models whose layers are cut, each tested to give the same bits. What others do between their products need not
# work on shards, such as a norm of all heads, and a start compares what is cut with itself, not with the whole model.
TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "ministral", "ministral3", "smollm3", "granite", "seed_oss", "gemma", "gemma2",
    "gemma3_text", "vaultgemma", "glm", "glm4", "phi3", "cohere", "cohere2", "olmo", "exaone4", "hunyuan_v1_dense", "helium",
    "ernie4_5", "arcee", "nemotron", "apertus", "jais2", "youtu",
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "glm4_moe",
)  # fmt: skip
# Of attention: what is cut by heads of keys, by heads of queries, and by outputs. Latent attention has none of the former.
_KEYS, _HEADS = ("k_proj", "v_proj"), ("q_proj", "q_b_proj", "kv_b_proj", "o_proj")
# All three in one, and gates before ups.
_JOINT, _GATED = "qkv_proj", "gate_up_proj"
_HEAD_NORMS = ("q_norm", "k_norm")
_FEED_FORWARD = ("gate_proj", "up_proj", _GATED, "down_proj")
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
    queries = Cut.evenly(index, count, heads * head_size)
    keys = Cut(ranges=(range(first * head_size, (first + some) * head_size),), whole=kv_heads * head_size)
    parts = {**dict.fromkeys(_KEYS, keys), _JOINT: _one_after_the_other(queries, keys, keys)}
    prefix = f"{model.base_model_prefix}."
    for number, layer in enumerate(decoder.layers):
        attention, place = layer.self_attn, f"{prefix}layers.{number}"
        _check_head_norms(attention, head_size, count)
        if hasattr(attention, "k_proj") or hasattr(attention, _JOINT):
            attention.num_key_value_groups = heads // count // some
        if hasattr(attention, _JOINT):
            # Where the product is parted again.
            attention.config, attention.num_key_value_heads = copy(attention.config), some
            attention.config.num_attention_heads = heads // count
        for name in (*_KEYS, *_HEADS, _JOINT):
            if getattr(attention, name, None) is not None:
                found |= _cut(attention, name, f"{place}.self_attn.{name}", shards, parts.get(name))
        if "sinks" in attention._parameters:
            found |= _cut_parameter(attention, "sinks", f"{place}.self_attn.sinks", shards, axis=0)
        for part, module in _feed_forwards(layer):
            for name in _FEED_FORWARD:
                if hasattr(module, name):
                    found |= _cut(module, name, f"{place}.{part}.{name}", shards, None, 2 if name == _GATED else 1)
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
        model.lm_head = ShardedOutput(model.lm_head, shards)


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
    text = model.config.get_text_config()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    try:
        cut = cut_layers(model, StageRanks(0, _fewest_ranks(text)))
    except ConfigurationError:
        return Uncut()
    layers, inside = model.get_decoder().layers, f"{model.base_model_prefix}.layers."
    whole = {name: size for name, size in sizes.items() if name not in cut}
    in_layers = sum(size for name, size in whole.items() if name.startswith(inside))
    # Of what makes queries, keys and values in one, those that make the latter two.
    of_joint = 2 * text.num_key_value_heads / (text.num_attention_heads + 2 * text.num_key_value_heads)
    shares = {**dict.fromkeys(_KEYS, 1.0), _JOINT: of_joint}
    keys = round(sum(size * share for name, size in sizes.items() for key, share in shares.items() if f".{key}." in name))
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
    yield from (("mlp", layer.mlp),) if hasattr(layer.mlp, "down_proj") else ()
    for name in ("shared_experts", "shared_expert"):
        if hasattr(layer.mlp, name):
            yield f"mlp.{name}", getattr(layer.mlp, name)


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
    cut = Cut.evenly(shards.index, shards.count, size, axis=axis, pieces=pieces)
    shape = list(whole.shape)
    shape[axis] = cut.held
    setattr(parent, name, nn.Parameter(torch.empty(shape, device="meta", dtype=whole.dtype), requires_grad=False))
    yield place, cut


def _no_shares(place: str, rows: int, shards: StageRanks) -> ConfigurationError:
    return ConfigurationError(
        f"{place} has {rows} rows, which have no equal shares", field="verifier.tensor_parallel_size", value=shards.count
    )


def _one_after_the_other(*cuts: Cut) -> Cut:
    """Of weights that lie so in one."""
    ranges, before = list[range](), 0
    for cut in cuts:
        ranges += [range(before + one.start, before + one.stop) for one in cut.ranges]
        before += cut.whole
    return Cut(ranges=tuple(ranges), whole=before)


def _check_head_norms(attention: nn.Module, head_size: int, ranks: int) -> None:
    """Check that norms before attention are over one head each, so that a rank's heads suffice.

    Raises:
        ConfigurationError: one is over several.
    """
    for name in _HEAD_NORMS:
        weight = getattr(getattr(attention, name, None), "weight", None)
        if weight is not None and weight.numel() != head_size:
            raise ConfigurationError(
                f"{name} is over {weight.numel()} numbers, of which ranks would have their own heads' ({head_size} each)",
                field="verifier.tensor_parallel_size",
                value=ranks,
                allowed="1",
            )


def _cut(
    parent: nn.Module, name: str, place: str, shards: StageRanks, cut: Cut | None, pieces: int = 1
) -> Iterator[tuple[str, Cut]]:
    """Replace a layer by a smaller one on the meta device; by default all ranks get as much, of each of the pieces.

    Raises:
        ConfigurationError: they cannot; a configuration may call its sizes by other names than are checked before.
    """
    layer = getattr(parent, name)
    whole, other = layer.weight.shape
    if cut is None and whole % (shards.count * pieces):
        raise _no_shares(place, whole, shards)
    cut = cut or Cut.evenly(shards.index, shards.count, whole, pieces=pieces)
    made: nn.Module
    if isinstance(layer, nn.Embedding):
        # Of the same class: some multiply what they look up.
        made = copy(layer)
        made._parameters, made.num_embeddings, made.padding_idx = dict(layer._parameters), cut.held, None
        made.weight = nn.Parameter(
            torch.empty(cut.held, other, device="meta", dtype=layer.weight.dtype), requires_grad=False
        )
    else:
        made = nn.Linear(other, cut.held, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype)
    setattr(parent, name, made)
    return ((f"{place}.{own}", cut) for own, _ in made.named_parameters())
