"""Settings of a verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.verifier.engine.config import LoopConfig

Dtype = Literal["float32", "bfloat16", "int8"]
Weights = Literal["auto", "float32", "as_stored"]
Kernels = Literal["auto", "avx512", "avx2", "neon", "onednn", "torch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The target model and its cache.

    Attributes:
        model_path: a folder with weights in safetensors, its configuration and its tokeniser.
        dtype: of weights and cache. Losslessness is bit for bit in float32. int8 means the weights of linear layers;
            the rest, and all arithmetic, is float32 on a CPU and bfloat16 on a GPU.
        weights: on a CPU, what linear layers are multiplied from: their float32 numbers, or the blocks of a GGUF file and
            the bfloat16 numbers of others as they are stored, the same numbers in fewer bytes; auto: what is faster.
        kernels: on a CPU, what multiplies them: our own, compiled for an instruction set, oneDNN or torch; auto: the
            fastest exact ones, by measurement.
        kernels_dir: where measurements of kernels are kept; None: they are taken at every start.
        kv_cache_tokens: rows of the key-value pool, over all requests.
        max_model_len: most tokens of prompt and answer; None: what the model was made for.
        threads: of torch, in each stage; None: the cores that a process may use, shared by the stages.
        enable_prefix_caching: requests of one tenant share the cache of what they begin with.
        stages: processes that the layers are split over.
        stage_host: where the stages find each other: the address of one of this machine's interfaces.
        pass_timeout_s: a pass that takes longer hangs, and the target is built anew. Generous, since one that is merely slow
            would fail again and again: 256 rows of a prompt take a model of 8 billion parameters most of a minute on two
            cores. A stage that dies is noticed at once.
        generation_config: whose generation_config.json counts; see ``read_generation_config``.
        override_generation_config: fields that count instead of that file's.
    """

    model_path: str
    dtype: Dtype = "float32"
    device: str = "cpu"
    weights: Weights = "auto"
    kernels: Kernels = "auto"
    kernels_dir: Path | None = None
    kv_cache_tokens: int = 16384
    max_model_len: int | None = None
    threads: int | None = None
    enable_prefix_caching: bool = True
    stages: int = 1
    stage_host: str = "127.0.0.1"
    pass_timeout_s: float = 120.0
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierConfig:
    """A verifier: its target, its loop and its budget.

    Attributes:
        max_nodes: most drafted nodes of one request's tree.
        budget: ``measured`` checks the nodes that maximise tokens per second at the present load; ``fixed`` all of them.
        max_step_s: longest that a step shall take for the sake of prompts while others are decoded; needs measured costs.
        costs_dir: where measured costs are kept; None: they are measured at every start.
    """

    model_name: str
    target: TargetConfig
    loop: LoopConfig = field(default_factory=LoopConfig)
    max_nodes: int = 64
    budget: Literal["measured", "fixed"] = "measured"
    max_step_s: float = 0.5
    costs_dir: Path | None = None
