"""Estimates what a model needs of GPUs: memory, and the time to read it. Nothing here was measured by us.

A pass cannot be faster than the memory gives the weights and the cached keys and values, nor than the matrix units multiply
(the roofline). The layers are split over the GPUs as pipeline stages, which one pass goes through one after the other, or
each layer over ranks, which exchange what they make four times a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.verifier.config import TargetConfig
    from services.verifier.loading.memory import Shape

_GB, _GIB = 1e9, 2**30
# What CUDA's context and its libraries take.
_CONTEXT_BYTES = 1.0 * _GIB
# torchao's int8 layers read a byte for each weight, and write and read it as bfloat16, in every pass.
_MOVED_BY_INT8 = 1 + 2 + 2
MANY_ROWS = 64
# Seconds of a gather of few bytes, as public one-shot kernels take at 2 to 8 H100s (SGLang, pull request 2904; not measured
# here), and gathers in a layer: behind the heads, the output product, the gate, and down.
_GATHER_S, _GATHERS = 5e-6, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind:
    """A kind of GPU.

    Attributes:
        memory: bytes.
        bandwidth: of the memory, bytes per second, by datasheet.
        arithmetic: of dense products in bfloat16, operations per second: seen on large products for A100, H100 and H200,
            70 % of the datasheet's for the others.
        link: bytes per second that a GPU gets from others in one gather: 370 GB/s where NVLink has 900 by datasheet, and in
            proportion. Assumed.
        fp8: whether it multiplies in fp8, at twice that rate by datasheet.
    """

    memory: float
    bandwidth: float
    arithmetic: float
    link: float
    fp8: bool = True


GPUS = {
    "A100": GpuKind(memory=80 * _GB, bandwidth=2.04e12, arithmetic=2.5e14, link=2.47e11, fp8=False),
    "H100": GpuKind(memory=80 * _GB, bandwidth=3.35e12, arithmetic=7.0e14, link=3.7e11),
    "H200": GpuKind(memory=141 * _GB, bandwidth=4.8e12, arithmetic=7.9e14, link=3.7e11),
    "H20": GpuKind(memory=96 * _GB, bandwidth=4.0e12, arithmetic=1.0e14, link=3.7e11),
    "B200": GpuKind(memory=180 * _GB, bandwidth=7.7e12, arithmetic=1.57e15, link=7.4e11),
    # Without NVLink: over PCIe.
    "L40S": GpuKind(memory=48 * _GB, bandwidth=8.6e11, arithmetic=2.5e14, link=2.6e10),
}
# Ranks whose GPUs share a fast link.
_MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What one GPU holds, and how long passes take at least.

    Attributes:
        weights, cache, drafters, graphs: bytes of the fullest GPU; ``graphs`` with CUDA's context, NCCL's buffers and what
            comes and goes.
        cache_tokens: that the cache holds, over all requests.
        free: what is left of it.
        step_s: seconds of a pass over one row without context, at least; each stage waits for the one before.
        many_s: the same for ``MANY_ROWS`` rows.
    """

    weights: float
    cache: float
    cache_tokens: int
    drafters: float
    graphs: float
    free: float
    step_s: float
    many_s: float


def gpus_named(text: str) -> tuple[int, str]:
    """Number and kind, from text such as 2xH100.

    Raises:
        ConfigurationError: it is no such text, or no such GPU is known.
    """
    count, _, kind = text.partition("x")
    if not count.isdecimal() or int(count) < 1 or kind.upper() not in GPUS:
        raise ConfigurationError(
            field="--gpus", value=text, allowed=f"a number, x and one of {', '.join(GPUS)}, such as 2xH100"
        )
    return int(count), kind.upper()


def size_up(config: TargetConfig, shape: Shape, kind: GpuKind, drafters: float = 0.0) -> GpuPlan:
    """Plan a target of ``config.processes`` GPUs of one kind.

    Args:
        drafters: bytes of the models that draft in the verifier's process, beside the last stage.

    Raises:
        ConfigurationError: it does not fit; says what would.
    """
    from services.verifier.loading.memory import buffer_bytes, graph_bytes, share_of, with_cache_of

    if config.dtype == "fp8" and not kind.fp8:
        able = ", ".join(name for name, other in GPUS.items() if other.fp8)
        raise ConfigurationError(
            f"with --gpus it needs one of {able}; use bfloat16 or int8", field="verifier.dtype", value="fp8"
        )
    free = kind.memory - _CONTEXT_BYTES - drafters
    config = with_cache_of(config, shape, share_of(config, kind.memory, free), fp8=kind.fp8, least=config.max_model_len or 1)
    weights, cache = shape.weights(config), shape.cache(config)
    graphs = graph_bytes(config, shape) + buffer_bytes(config, shape)
    moved = shape.read_per_pass(config) * (_MOVED_BY_INT8 if config.dtype == "int8" else 1)
    parameters = shape.per_layer * shape.layers + shape.others - shape.embeddings
    reading = moved / kind.bandwidth / config.tensor_parallel_size
    operations = kind.arithmetic * (2 if config.dtype == "fp8" else 1) * config.tensor_parallel_size
    return GpuPlan(
        weights=weights,
        cache=cache,
        cache_tokens=config.cache_tokens,
        drafters=drafters,
        graphs=_CONTEXT_BYTES + graphs,
        free=free - weights - cache - graphs,
        step_s=reading + _gathering(config, shape, kind, 1),
        many_s=max(reading, 2 * parameters * MANY_ROWS / operations) + _gathering(config, shape, kind, MANY_ROWS),
    )


def _gathering(config: TargetConfig, shape: Shape, kind: GpuKind, rows: int) -> float:
    """Seconds in which ranks exchange what they make of so many rows, in bfloat16, in all layers."""
    if config.tensor_parallel_size == 1:
        return 0.0
    return shape.layers * (_GATHERS * _GATHER_S + 2 * shape.gathered * rows / kind.link)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSplit:
    """A target on all GPUs, as ``ranks`` of each of ``stages``."""

    ranks: int
    stages: int
    plan: GpuPlan


def splits_of(config: TargetConfig, shape: Shape, kind: GpuKind, count: int, sizes: Mapping[str, Any]) -> list[GpuSplit]:
    """All ways to split a target over ``count`` GPUs by which it fits, the fastest for one request first.

    Args:
        sizes: fields of the model's configuration.
    """
    from services.verifier.loading.rank_sizes import check_rank_sizes

    found = []
    for ranks in range(1, min(count, _MOST_RANKS) + 1):
        stages = count // ranks
        if count % ranks or stages > shape.layers:
            continue
        try:
            check_rank_sizes(ranks, sizes)
            plan = size_up(replace(config, stages=stages, tensor_parallel_size=ranks), shape, kind)
        except ConfigurationError:
            continue
        found.append(GpuSplit(ranks=ranks, stages=stages, plan=plan))
    return sorted(found, key=lambda split: split.plan.step_s)


def split_sentence(splits: Sequence[GpuSplit]) -> str:
    """What ranks would bring, in words; empty if nothing."""
    if not splits or splits[0].ranks == 1:
        return ""
    best, alone = splits[0], next((split.plan for split in splits if split.ranks == 1), None)
    of_stages = f" of each of {best.stages} stages" if best.stages > 1 else ""
    instead = "" if alone is None else f" instead of {1 / alone.step_s:.0f}"
    return (
        f"as {best.ranks} ranks{of_stages} (verifier.tensor_parallel_size, on CPUs alone so far) a pass would take at least "
        f"{1e3 * best.plan.step_s:.1f} ms, {1e3 * best.plan.many_s:.1f} with {MANY_ROWS} rows: at most "
        f"{1 / best.plan.step_s:.0f} tokens/s for one request{instead}"
    )


def sentence(found: GpuPlan, count: int, name: str) -> str:
    """The plan in words."""
    parts = [f"{found.weights / _GB:.1f} GB of weights", f"{found.cache / _GB:.1f} of cache ({found.cache_tokens:,} tokens)"]
    parts += [f"{found.drafters / _GB:.1f} of drafters"] if found.drafters else []
    parts += [f"{found.graphs / _GB:.1f} of graphs, buffers and CUDA"]
    return (
        f"{count} x {name}, on paper: {', '.join(parts)} on the fullest GPU, {found.free / _GB:.1f} left; a pass takes at "
        f"least {1e3 * found.step_s:.1f} ms, {1e3 * found.many_s:.1f} with {MANY_ROWS} rows: plain decoding gives one "
        f"request at most {1 / found.step_s:.0f} tokens/s"
    )
