"""Checks whether a model can be split over stages and evenly over ranks, from the sizes in its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculation.errors import ConfigurationError

# Columns of a rank must fill whole vectors, or other kernels would compute them (``native.layer_kernel``).
_COLUMNS = 16


def check_split(stages: int, ranks: int, sizes: Mapping[str, Any]) -> None:
    """Check the number of pipeline stages, and of the ranks of each.

    Args:
        sizes: fields of the model's configuration; what it leaves out is not checked.

    Raises:
        ConfigurationError: there are more stages than layers, or ranks cannot have equal shares.
    """
    layers = sizes.get("num_hidden_layers")
    if isinstance(layers, int) and stages > layers:
        raise ConfigurationError(
            f"the model has {layers} layers, so 1 to {layers} are possible", field="verifier.stages", value=stages
        )
    check_rank_sizes(ranks, sizes)


def check_rank_sizes(ranks: int, sizes: Mapping[str, Any]) -> None:
    """Check that there is an equal share of heads, columns and tokens for every rank.

    Args:
        sizes: fields of the model's configuration; what it leaves out is not checked.

    Raises:
        ConfigurationError: there is not; says with how many there would be.
    """
    names = ("num_attention_heads", "vocab_size", "hidden_size", "intermediate_size")
    found = [size for size in map(sizes.get, names) if isinstance(size, int) and size > 0]
    if ranks == 1 or len(found) < len(names):
        return
    heads, vocabulary, *columns = found
    # Of each expert.
    if isinstance(inner := sizes.get("moe_intermediate_size"), int) and inner > 0:
        columns.append(inner)
    kv_heads: int = sizes.get("num_key_value_heads") or heads

    def fits(count: int) -> bool:
        # Several ranks may hold the same key head.
        shared = kv_heads % count == 0 or count % kv_heads == 0
        return heads % count == 0 == vocabulary % count and shared and not any(size % (count * _COLUMNS) for size in columns)

    if not fits(ranks):
        possible = [str(count) for count in range(1, heads + 1) if count == 1 or fits(count)]
        wide = f"{', '.join(map(str, columns[:-1]))} and {columns[-1]}"
        raise ConfigurationError(
            f"the model has {heads} heads, {kv_heads} of keys, {wide} columns and {vocabulary} tokens",
            field="verifier.tensor_parallel_size",
            value=ranks,
            allowed=f"one of {', '.join(possible)}" if len(possible) > 1 else "1",
        )
