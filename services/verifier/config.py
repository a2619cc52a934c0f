"""Settings of a verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from services.settings import Setting
from services.verifier.engine.config import LoopConfig
from speculation.errors import ConfigurationError

Dtype = Literal["float32", "bfloat16", "int8", "fp8"]
Weights = Literal["auto", "float32", "as_stored"]
Kernels = Literal["auto", "avx512", "avx2", "neon", "onednn", "triton", "cublaslt", "torch"]
AttentionBackend = Literal["auto", "triton", "torch"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
# What multiplies where.
_CPU_KERNELS: tuple[Kernels, ...] = ("auto", "avx512", "avx2", "neon", "onednn", "torch")
_GPU_KERNELS: tuple[Kernels, ...] = ("auto", "triton", "cublaslt", "torch")
# Tokens of the KV cache where neither a setting nor a GPU's memory says how many.
CACHE_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The target model and its KV cache.

    Attributes:
        model_path: a folder with weights in safetensors, configuration and tokeniser.
        shared_with: folder of the model that has the weights which ``model_path`` shares with its target, if it shares any.
        dtype: int8 and fp8 (e4m3) apply to the weights of linear layers; everything else, and all arithmetic, is float32 on
            a CPU and bfloat16 on a GPU. torchao's kernels round what is multiplied by fp8 weights as well.
        weights: as_stored keeps the blocks of a GGUF file, else bfloat16.
        kernels_dir: where kernel measurements are kept; None: they are repeated at every start.
        draft_adapter: folder of the adapter of noise rows, by which the target drafts (Uno); None: it has no such rows.
        pass_rows, pass_requests: largest pass that the loop makes, but for prompts; on a GPU, passes up to it are captured.
        observed_layers: layers whose hidden states drafters ask for; passes that keep them are captured, too.
        states_stay: these states are read on the target's device alone, and are not copied to the host.
        kept_state_bytes: most bytes of them that are kept for drafters, there.
        generation_config, override_generation_config: see ``read_generation_config``.
    """

    model_path: str
    shared_with: Path | None = None
    dtype: Annotated[
        Dtype,
        Setting(
            "numbers of the weights and of the KV cache: float32 gives lossless answers bit for bit; bfloat16 takes half "
            "the memory, int8 and fp8 (on a GPU alone) a quarter for the weights, and round"
        ),
    ] = "float32"
    device: Annotated[str, Setting("where the target computes, as torch names it: cpu, cuda, cuda:1")] = "cpu"
    weights: Annotated[
        Weights,
        Setting(
            "on a CPU, how linear layers hold their weights: float32, or as_stored, the same numbers in fewer bytes, as "
            "files store them; auto: the faster one"
        ),
    ] = "auto"
    kernels: Annotated[
        Kernels,
        Setting(
            "what multiplies by the weights: our kernels for an instruction set, or oneDNN, on a CPU, triton or cublaslt "
            "on a GPU, or torch, which is not exact; auto: the fastest exact ones, measured at the first start"
        ),
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackend,
        Setting(
            "triton: our attention kernels for GPUs, which are exact; torch: its own; auto: triton where it takes the model"
        ),
    ] = "auto"
    kernels_dir: Path | None = None
    kv_cache_tokens: Annotated[
        int | None,
        Setting(
            "tokens that the KV cache holds, over all requests, which is what its memory grows with; when it is full, the "
            "request that came last is preempted; null: on a GPU what gpu_memory_utilization leaves, on a CPU "
            f"{CACHE_TOKENS}",
            ge=64,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Setting(
            "numbers of the KV cache: auto: those of the model's arithmetic; fp8, the same as fp8_e4m3: eight bits with a "
            "scale for each row and head, by our own attention alone: some 1/4 of float32's memory, 1/2 of bfloat16's, and "
            "other answers"
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Setting(
            "share of a GPU's memory that the target may take, of which the KV cache gets what all else leaves; "
            "kv_cache_tokens goes before it",
            gt=0,
            le=1,
        ),
    ] = 0.9
    max_model_len: Annotated[
        int | None, Setting("most tokens of prompt and answer together; null: the model's own limit", ge=2)
    ] = None
    threads: Annotated[
        int | None,
        Setting(
            "torch's threads in each stage, and in each rank of it; null: the cores that the process may use, shared by all",
            ge=1,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Setting("whether requests of one API key share the KV cache of their common prefixes")
    ] = True
    mamba_block_size: Annotated[
        int,
        Setting(
            "of models whose layers have states, tokens, in blocks of 64, after which a state is kept each time, so that a "
            "prompt that begins as an earlier one did begins there; kv_cache_tokens divided by it is how many are kept, "
            "beside those of running requests",
            ge=64,
            multiple_of=64,
        ),
    ] = 512
    stages: Annotated[
        int, Setting("pipeline stages: processes that the model's layers are split over, each with its share", ge=1)
    ] = 1
    tensor_parallel_size: Annotated[
        int,
        Setting(
            "ranks of each stage: processes that share each layer's products and heads, and the vocabulary; answers are the "
            "same for any number",
            ge=1,
        ),
    ] = 1
    stage_host: Annotated[
        str, Setting("address of the interface on which stages and ranks find each other; 0.0.0.0: the node's own")
    ] = "127.0.0.1"
    draft_adapter: Path | None = None
    pass_rows: int = 256
    pass_requests: int = 16
    observed_layers: Sequence[int] = ()
    states_stay: bool = False
    kept_state_bytes: int = 0
    # Generous, because a pass that is merely slow would fail again and again: 256 prompt rows of a model with 8 billion
    # parameters take most of a minute on two cores. A stage that dies is noticed at once.
    pass_timeout_s: Annotated[
        float,
        Setting(
            "with several stages or ranks, seconds after which a pass counts as hung and the target is rebuilt",
            gt=0,
            le=3600,
        ),
    ] = 120.0
    generation_config: Annotated[
        str,
        Setting(
            "auto: the model's generation_config.json gives the defaults of requests and the processing of logits; none: "
            "only its end-of-text tokens count; or a folder with another such file"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        Mapping[str, Any],
        Setting("fields that replace those of generation_config.json, such as {temperature: 0.7, min_p: null}"),
    ] = field(default_factory=dict)
    lora_modules: Annotated[
        Mapping[str, str],
        Setting(
            "LoRA adapters in PEFT's format: the model name by which requests ask for each, and its folder, such as "
            "{billing: /adapters/billing}"
        ),
    ] = field(default_factory=dict)
    lora_folders: Annotated[
        tuple[Path, ...],
        Setting("folders from which adapters may be loaded while serving; []: none may"),
    ] = ()

    @property
    def quantised(self) -> bool:
        """Whether the weights of decoder layers are rounded to eight bits."""
        return self.dtype in ("int8", "fp8")

    @property
    def rounds_cache(self) -> bool:
        """Whether keys and values are rounded to eight bits when they are stored."""
        return self.kv_cache_dtype != "auto"

    @property
    def by_torchao(self) -> bool:
        """Whether torchao's kernels are to multiply by weights of eight bits on a GPU, and not ours."""
        return self.quantised and self.device != "cpu" and self.kernels == "torch"

    @property
    def adapts(self) -> bool:
        """Whether rows of its passes may have adapters."""
        return bool(self.lora_modules or self.lora_folders or self.draft_adapter)

    @property
    def processes(self) -> int:
        """Of the target: the ranks of all its stages."""
        return self.stages * self.tensor_parallel_size

    @property
    def processes_here(self) -> int:
        """Those of them that run on one machine, as far as the settings say."""
        return self.processes if self.stage_host in ("127.0.0.1", "::1") else 1

    @property
    def sized_by_gpu(self) -> bool:
        """Whether the memory of a GPU is to say how many tokens the KV cache holds."""
        return self.kv_cache_tokens is None and self.device != "cpu"

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds. Where it is ``sized_by_gpu`` they are not known yet."""
        return CACHE_TOKENS if self.kv_cache_tokens is None else self.kv_cache_tokens


def check_backends(config: TargetConfig) -> None:
    """Check that ``dtype``, ``kernels`` and ``attention_backend`` are made for the device.

    Raises:
        ConfigurationError: they are not; names the setting and what is allowed.
    """
    on_gpu = config.device.partition(":")[0] == "cuda"
    if config.dtype == "fp8" and not on_gpu:
        raise ConfigurationError(
            field="verifier.dtype",
            value="fp8",
            given=f"which needs a GPU, and verifier.device is {config.device}",
            allowed="float32, bfloat16 or int8",
        )
    allowed = _GPU_KERNELS if on_gpu else _CPU_KERNELS
    if config.kernels not in allowed:
        raise ConfigurationError(
            field="verifier.kernels",
            value=config.kernels,
            given=f"which is for a {('CPU' if on_gpu else 'GPU')}, and verifier.device is {config.device}",
            allowed=f"one of {', '.join(allowed)}",
        )
    if config.dtype == "bfloat16" and not on_gpu and config.kernels not in ("auto", "torch"):
        raise ConfigurationError(
            field="verifier.kernels",
            value=config.kernels,
            given="which computes in float32, and verifier.dtype is bfloat16",
            allowed="auto or torch on a CPU",
        )
    if config.attention_backend == "triton" and not on_gpu:
        raise ConfigurationError(
            field="verifier.attention_backend",
            value="triton",
            given=f"which needs a GPU, and verifier.device is {config.device}",
            allowed="auto or torch",
        )
    _check_cache(config, on_gpu=on_gpu)
    _check_ranks(config, on_gpu=on_gpu)
    _check_adapters(config, on_gpu=on_gpu)


def _check_cache(config: TargetConfig, *, on_gpu: bool) -> None:
    """Our own attention alone rounds keys and values: on a GPU those of bfloat16, on a CPU of float32."""
    if not config.rounds_cache:
        return
    for field_name, found, refused in (
        ("dtype", config.dtype, config.dtype == ("float32" if on_gpu else "bfloat16")),
        ("kernels", config.kernels, not on_gpu and config.kernels in ("onednn", "torch")),
        ("attention_backend", config.attention_backend, config.attention_backend == "torch"),
    ):
        if refused:
            raise ConfigurationError(
                field="verifier.kv_cache_dtype",
                value=config.kv_cache_dtype,
                given=f"and verifier.{field_name} is {found}",
                allowed="auto there; fp8 by our own attention, on a CPU in float32 or int8 by our own kernels, on a GPU in "
                "bfloat16, int8 or fp8",
            )


def _check_ranks(config: TargetConfig, *, on_gpu: bool) -> None:
    """Only some kernels give a column of a product the same bits whatever is beside it (``kernels.shard_check``)."""
    if config.tensor_parallel_size == 1:
        return
    if on_gpu:
        allowed = (
            "1 there; more on a GPU in bfloat16, int8 or fp8, with verifier.kernels: auto, triton or cublaslt and "
            "verifier.attention_backend: triton"
        )
        right: dict[str, tuple[str, ...]] = {
            "dtype": ("bfloat16", "int8", "fp8"), "kernels": ("auto", "triton", "cublaslt"), "attention_backend": ("triton",)
        }  # fmt: skip
    else:
        allowed = "1 there; more on a CPU in float32 or int8, by our own kernels and attention"
        ours = tuple(each for each in _CPU_KERNELS if each not in ("onednn", "torch"))
        right = {"dtype": ("float32", "int8"), "kernels": ours, "attention_backend": ("auto",)}
    for field_name, possible in right.items():
        if (found := getattr(config, field_name)) not in possible:
            raise ConfigurationError(
                field="verifier.tensor_parallel_size",
                value=config.tensor_parallel_size,
                given=f"and verifier.{field_name} is {found}",
                allowed=allowed,
            )


def _check_adapters(config: TargetConfig, *, on_gpu: bool) -> None:
    """Adapters are computed by our kernels for a CPU."""
    if not config.adapts:
        return
    own, named = "drafter.models", str(config.draft_adapter)
    if config.lora_modules or config.lora_folders:
        own = "verifier.lora_modules" if config.lora_modules else "verifier.lora_folders"
        named = ", ".join(map(str, config.lora_modules or config.lora_folders))
    for field_name, found, refused in (
        ("device", config.device, on_gpu),
        ("dtype", config.dtype, config.dtype == "bfloat16"),
        ("kernels", config.kernels, config.kernels in ("onednn", "torch")),
    ):
        if refused:
            raise ConfigurationError(
                field=own,
                value=named,
                given=f"and verifier.{field_name} is {found}",
                allowed="left out there; adapters are served on a CPU in float32 or int8, by our own kernels",
            )


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """A verifier: its target, its loop and its budget.

    Attributes:
        costs_dir: where measured costs are kept, and what steps have shown of drafting; None: nothing is kept.
        tokenizer: digest of the model's tokenizer, which requests that tell of theirs must have; empty: not known.
    """

    model_name: str
    target: TargetConfig
    loop: LoopConfig = field(default_factory=LoopConfig)
    max_nodes: Annotated[
        int, Setting("most drafted tokens of one request that a step verifies: the size of its tree", ge=0, le=128)
    ] = 64
    budget: Annotated[
        Literal["measured", "fixed"],
        Setting(
            "measured: each step verifies the drafted tokens that maximise tokens per second at the current load, none if "
            "none pay; fixed: it verifies all"
        ),
    ] = "measured"
    max_step_s: Annotated[
        float,
        Setting(
            "seconds to which prompt chunks may extend a step while others decode, which bounds the gaps in their streams; "
            "needs budget: measured",
            gt=0,
            le=60,
        ),
    ] = 0.5
    costs_dir: Path | None = None
    keep_learnt: Annotated[
        bool,
        Setting(
            "whether to store in cache_dir at which loads drafting was faster than plain decoding, so that the next start "
            "need not find it out again; it holds no text"
        ),
    ] = True
    tokenizer: str = ""
    weights_from: Annotated[
        tuple[Path, ...],
        Setting(
            "folders in which the folders lie whose weights may take the place of the served ones while serving (`outrider "
            "reload`), at the verifier; []: weights are not replaced"
        ),
    ] = ()
    check_every: Annotated[
        int,
        Setting("one in so many drafted answers is decoded again, plainly, while nobody waits, and compared; 0: none", ge=0),
    ] = 1000
