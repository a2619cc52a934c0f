"""Whether a target fits into memory, found before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from services.machine import free_memory
from services.verifier.config import Dtype, TargetConfig
from speculation.errors import ConfigurationError

_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
_GIB = 2**30


def arithmetic_dtype(config: TargetConfig) -> torch.dtype:
    """Of hidden states and cache."""
    if config.dtype == "int8":
        return torch.float32 if config.device == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a model's size depends on: parameters in its layers and outside of them, and a token's part of the cache.

    ``embeddings`` are among ``others``: of them a pass reads its tokens' rows alone. ``stored_bytes`` has a parameter in the
    model's files; ``kept_bytes`` has one of a linear layer that keeps its weights in that form, None where none does.
    """

    layers: int
    per_layer: int
    others: int
    embeddings: int
    stored_bytes: int
    cache_values_per_token: int
    kept_bytes: float | None = None

    def weights(self, config: TargetConfig) -> float:
        """Bytes of the largest stage's weights, while they are loaded."""
        layers = self.per_layer * -(-self.layers // config.stages)
        if self.kept_bytes is not None:
            return (layers + self.others - self.embeddings) * self.kept_bytes + self.embeddings * 4
        # What becomes int8 is loaded as it is stored.
        size = max(_BYTES[config.dtype], self.stored_bytes) if config.dtype == "int8" else _BYTES[config.dtype]
        return (layers + self.others) * size

    def read_per_pass(self, config: TargetConfig) -> float:
        """Bytes of weights that all stages together read in a pass."""
        read = self.per_layer * self.layers + self.others - self.embeddings
        return read * (_BYTES[config.dtype] if self.kept_bytes is None else self.kept_bytes)

    def cache(self, config: TargetConfig) -> float:
        """Bytes of the largest stage's cache."""
        return self.cache_values_per_token * config.kv_cache_tokens * arithmetic_dtype(config).itemsize / config.stages


def check_fits(config: TargetConfig, shape: Shape, available: float) -> None:
    """Compare.

    Args:
        available: bytes, for one stage.

    Raises:
        ConfigurationError: it does not fit; says what would.
    """

    def fits(other: TargetConfig) -> bool:
        return shape.weights(other) + shape.cache(other) <= available

    if fits(config):
        return
    smaller = [config.kv_cache_tokens >> halvings for halvings in range(1, 12)]
    tokens = next((count for count in smaller if fits(replace(config, kv_cache_tokens=count))), None)
    stages = next((n for n in range(config.stages + 1, shape.layers + 1) if fits(replace(config, stages=n))), None)
    dtypes = [dtype for dtype in _BYTES if _BYTES[dtype] < _BYTES[config.dtype] and fits(replace(config, dtype=dtype))]
    ways = [f"kv_cache_tokens: {tokens}"] if tokens else []
    ways += [f"dtype: {dtype}" for dtype in dtypes]
    ways += [f"stages: {stages}, on other machines or GPUs"] if stages else []
    raise ConfigurationError(
        f"the model does not fit: {shape.weights(config) / _GIB:.1f} GiB of weights ({config.dtype}) and "
        f"{shape.cache(config) / _GIB:.1f} GiB of cache (kv_cache_tokens: {config.kv_cache_tokens}) in each of "
        f"{config.stages} stages, {available / _GIB:.1f} GiB are free; "
        + (
            f"one of these would fit: {'; '.join(ways)}"
            if ways
            else "no one of dtype, stages and kv_cache_tokens helps alone"
        )
    )


def available_bytes(device: torch.device) -> float:
    """Free memory of a device, or of this machine within the limits that a container sets."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()
