"""Settings of a verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from speculation.config import LoopConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The target model and its cache.

    Attributes:
        model_path: a folder with weights in safetensors, its configuration and its tokeniser.
        dtype: of weights and cache. Losslessness is bit for bit in float32.
        kv_cache_tokens: rows of the key-value pool, over all requests.
        max_model_len: most tokens of prompt and answer; None: what the model was made for.
        threads: of torch; None: one for each core that this process may use.
    """

    model_path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    kv_cache_tokens: int = 16384
    max_model_len: int | None = None
    threads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierConfig:
    """A verifier: its target, its loop and its budget of drafted nodes per request and step."""

    model_name: str
    target: TargetConfig
    loop: LoopConfig = field(default_factory=LoopConfig)
    max_nodes: int = 64
