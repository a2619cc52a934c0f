"""Cuts a model without weights down to one rank's shard of it: heads, columns of products, and part of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.rounded_inputs import RoundedLinear
from services.model_files.weights.stored_blocks import StoredLinear
from services.verifier.kernels.sharded_layers import ShardedEmbedding, ShardedLinear
from services.verifier.loading.rank_sizes import check_rank_sizes
from services.verifier.stages.stage_ranks import Cut, StageRanks
from speculation.errors import ConfigurationError

# Types of models whose layers are cut, each tested to give the same bits. What others do between their products need not
# work on shards, such as a norm of all heads, and a start compares what is cut with itself, not with the whole model.
TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# What gets rows in shards.
_GATHERING = (("self_attn", "o_proj"), ("mlp", "down_proj"))


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
        layer.self_attn.num_key_value_groups = heads // count // some
        for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP)):
            for name in names:
                cut = keys if name in ("k_proj", "v_proj") else None
                place = f"{prefix}layers.{number}.{part}.{name}"
                found |= _cut(getattr(layer, part), name, place, shards, cut)
    if isinstance(decoder.embed_tokens, nn.Embedding):
        found |= _cut(decoder, "embed_tokens", f"{prefix}embed_tokens", shards, None)
    if not isinstance(model.lm_head, nn.Identity):
        found |= _cut(model, "lm_head", "lm_head", shards, None)
    return found


def gather_between(model: PreTrainedModel, shards: StageRanks) -> None:
    """Let the layers of a model that has been cut, and read, exchange what they make with the other ranks."""
    decoder = model.get_decoder()
    for layer in decoder.layers:
        for part, name in _GATHERING:
            parent = getattr(layer, part)
            setattr(parent, name, ShardedLinear(getattr(parent, name), shards, gathers=True))
    if isinstance(decoder.embed_tokens, nn.Embedding):
        decoder.embed_tokens = ShardedEmbedding(decoder.embed_tokens, shards)
    if isinstance(model.lm_head, (nn.Linear, StoredLinear, RoundedLinear)):
        model.lm_head = ShardedLinear(model.lm_head, shards, gathers=False)


def _cut(parent: nn.Module, name: str, place: str, shards: StageRanks, cut: Cut | None) -> Iterator[tuple[str, Cut]]:
    """Replace a layer by a smaller one on the meta device; by default all ranks get as much.

    Raises:
        ConfigurationError: they cannot; a configuration may call its sizes by other names than are checked before.
    """
    layer = getattr(parent, name)
    whole, other = layer.weight.shape
    each, left = divmod(whole, shards.count)
    if cut is None and left:
        raise ConfigurationError(
            f"{place} has {whole} rows, which have no equal shares",
            field="verifier.tensor_parallel_size",
            value=shards.count,
        )
    cut = cut or Cut(begin=shards.index * each, end=(shards.index + 1) * each, whole=whole)
    size = cut.end - cut.begin
    made: nn.Module
    if isinstance(layer, nn.Embedding):
        made = nn.Embedding(size, other, device="meta", dtype=layer.weight.dtype)
    else:
        made = nn.Linear(other, size, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype)
    setattr(parent, name, made)
    return ((f"{place}.{own}", cut) for own, _ in made.named_parameters())
