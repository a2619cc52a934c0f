"""Settings of a verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.verifier.engine.config import LoopConfig
from speculation.errors import ConfigurationError

Dtype = Literal["float32", "bfloat16", "int8", "fp8"]
Weights = Literal["auto", "float32", "as_stored"]
Kernels = Literal["auto", "avx512", "avx2", "neon", "onednn", "triton", "cublaslt", "torch"]
AttentionBackend = Literal["auto", "triton", "torch"]
# What multiplies where.
_CPU_KERNELS: tuple[Kernels, ...] = ("auto", "avx512", "avx2", "neon", "onednn", "torch")
_GPU_KERNELS: tuple[Kernels, ...] = ("auto", "triton", "cublaslt", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The target model and its KV cache.

    Attributes:
        model_path: a folder with weights in safetensors, configuration and tokeniser.
        shared_with: folder of the model that has the weights which ``model_path`` shares with its target, if it shares any.
        dtype: of weights and cache. In float32 answers are lossless bit for bit. int8 applies to the weights of linear
            layers; everything else, and all arithmetic, is float32 on a CPU and bfloat16 on a GPU. fp8 (e4m3, on a GPU)
            applies to these weights and to what is multiplied by them; everything else is bfloat16.
        weights: on a CPU, the format in which linear layers hold their weights: float32, or as stored (the blocks of a GGUF
            file, else bfloat16), which are the same numbers in fewer bytes; auto: the faster one.
        kernels: what multiplies by them: on a CPU our own kernels for an instruction set, oneDNN or torch, on a GPU our
            Triton kernels, cuBLASLt without split sums, or torch; auto: the fastest exact ones, by measurement.
        attention_backend: our Triton kernels, or torch's own attention; auto: Triton where it takes the model.
        kernels_dir: where kernel measurements are kept; None: they are repeated at every start.
        kv_cache_tokens: rows of the KV cache, over all requests.
        max_model_len: most tokens of prompt and answer; None: the model's own limit.
        threads: torch's threads in each stage; None: the cores that a process may use, shared by the stages.
        enable_prefix_caching: requests of one tenant share the cache of their common prefixes.
        stages: pipeline stages, each a process with a share of the layers.
        stage_host: where the stages find each other: the address of one of this machine's interfaces.
        pass_rows, pass_requests: largest pass that the loop makes, but for prompts; on a GPU, passes up to it are captured.
        observed_layers: layers whose hidden states drafters ask for; passes that keep them are captured, too.
        pass_timeout_s: seconds after which a pass counts as hung and the target is rebuilt. The default is generous because
            a pass that is merely slow would fail again and again: 256 prompt rows of a model with 8 billion parameters take
            most of a minute on two cores. A stage that dies is noticed at once.
        generation_config: which generation_config.json applies; see ``read_generation_config``.
        override_generation_config: fields that replace those of that file.
    """

    model_path: str
    shared_with: Path | None = None
    dtype: Dtype = "float32"
    device: str = "cpu"
    weights: Weights = "auto"
    kernels: Kernels = "auto"
    attention_backend: AttentionBackend = "auto"
    kernels_dir: Path | None = None
    kv_cache_tokens: int = 16384
    max_model_len: int | None = None
    threads: int | None = None
    enable_prefix_caching: bool = True
    stages: int = 1
    stage_host: str = "127.0.0.1"
    pass_rows: int = 256
    pass_requests: int = 16
    observed_layers: Sequence[int] = ()
    pass_timeout_s: float = 120.0
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Whether the weights of decoder layers are rounded to eight bits."""
        return self.dtype in ("int8", "fp8")


def check_backends(config: TargetConfig) -> None:
    """Check that ``dtype``, ``kernels`` and ``attention_backend`` are made for the device.

    Raises:
        ConfigurationError: they are not; names the setting and what is allowed.
    """
    on_gpu = config.device.partition(":")[0] == "cuda"
    if config.dtype == "fp8" and not on_gpu:
        raise ConfigurationError(
            f"verifier.dtype is fp8, which needs a GPU, and verifier.device is {config.device}: must be float32, bfloat16 "
            "or int8"
        )
    allowed = _GPU_KERNELS if on_gpu else _CPU_KERNELS
    if config.kernels not in allowed:
        raise ConfigurationError(
            f"verifier.kernels is {config.kernels}, which is for a {'CPU' if on_gpu else 'GPU'}, and verifier.device is "
            f"{config.device}: must be one of {', '.join(allowed)}"
        )
    if config.dtype == "bfloat16" and not on_gpu and config.kernels not in ("auto", "torch"):
        raise ConfigurationError(
            f"verifier.kernels is {config.kernels}, which computes in float32, and verifier.dtype is bfloat16: must be auto "
            "or torch on a CPU"
        )
    if config.attention_backend == "triton" and not on_gpu:
        raise ConfigurationError(
            f"verifier.attention_backend is triton, which needs a GPU, and verifier.device is {config.device}: "
            "must be auto or torch"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierConfig:
    """A verifier: its target, its loop and its budget.

    Attributes:
        max_nodes: most nodes of one request's tree.
        budget: ``measured`` verifies the nodes that maximise tokens per second at the current load, ``fixed`` all of them.
        max_step_s: seconds to which prompt chunks may extend a step while others decode; needs the measured budget.
        costs_dir: where measured costs are kept; None: they are measured at every start.
        check_every: one in so many drafted answers is decoded again, plainly, in a pause (``SelfCheck``); 0: none.
    """

    model_name: str
    target: TargetConfig
    loop: LoopConfig = field(default_factory=LoopConfig)
    max_nodes: int = 64
    budget: Literal["measured", "fixed"] = "measured"
    max_step_s: float = 0.5
    costs_dir: Path | None = None
    check_every: int = 1000
