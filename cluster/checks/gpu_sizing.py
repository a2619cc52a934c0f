"""Estimates what a model needs of GPUs: memory, and the time to read it. Nothing here was measured by us.

A pass takes at least as long as reading the weights and the cached keys and values, and at least as long as the matrix units
multiply (the roofline). Of a mixture of experts it reads those that its rows choose. Several GPUs are used in one of three
ways: the layers are split into pipeline stages, which a pass goes through one after the other; each layer is split over
ranks, which exchange their results; or several replicas share the requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from services.whole_number import whole_number
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
# here).
_GATHER_S = 5e-6


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
        fp8: whether it multiplies in fp8, at twice that rate by datasheet; torchao does, our kernels do not.
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
# Slower than any NVLink, in bytes per second.
_FAST_LINK = 1e11
# Ranks whose GPUs share a fast link.
_MOST_RANKS = 8
_MOST_GPUS = 1 << 20
# Splits whose passes differ by no more than this are equally fast on paper.
_SAME = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What one GPU holds, and how long passes take at least.

    Attributes:
        weights, cache, states, drafters, graphs: bytes of the fullest GPU; ``states`` of requests, prefixes and branches,
            with the rows that are noted for them; ``drafters`` with the target's hidden states that are kept for them;
            ``graphs`` with CUDA's context, NCCL's buffers and what comes and goes.
        cache_tokens: that the cache holds, over all requests.
        free: what is left of it.
        step_s: seconds of a pass over one row without context, at least; each stage waits for the one before.
        gather_s: of these, what the ranks' exchanges take.
        many_s: as ``step_s``, for ``MANY_ROWS`` rows.
    """

    weights: float
    cache: float
    cache_tokens: int
    states: float
    drafters: float
    graphs: float
    free: float
    step_s: float
    gather_s: float
    many_s: float


def gpus_named(text: str) -> tuple[int, str]:
    """Number and kind, from text such as 2xH100.

    Raises:
        ConfigurationError: it is no such text, or no such GPU is known.
    """
    number, _, kind = text.partition("x")
    if (count := whole_number(number, 1, _MOST_GPUS)) is None or kind.upper() not in GPUS:
        raise ConfigurationError(
            field="--gpus", value=text, allowed=f"a number, x and one of {', '.join(GPUS)}, such as 2xH100"
        )
    return count, kind.upper()


def size_up(config: TargetConfig, shape: Shape, kind: GpuKind, drafters: float = 0.0) -> GpuPlan:
    """Plan a target of ``config.processes`` GPUs of one kind.

    Args:
        drafters: bytes of the models that draft in the verifier's process, beside the last stage.

    Raises:
        ConfigurationError: it does not fit; says what would.
    """
    from services.verifier.loading.memory import (
        buffer_bytes,
        drafters_bytes,
        graph_bytes,
        share_of,
        stepped_bytes,
        with_cache_of,
    )

    if config.dtype == "fp8" and config.by_torchao and not kind.fp8:
        able = ", ".join(name for name, other in GPUS.items() if other.fp8)
        raise ConfigurationError(
            f"with --gpus and verifier.kernels: torch it needs one of {able}; use auto", field="verifier.dtype", value="fp8"
        )
    free, fp8 = kind.memory - _CONTEXT_BYTES - drafters, kind.fp8 or config.kernels != "torch"
    config = with_cache_of(config, shape, share_of(config, kind.memory, free), fp8=fp8, least=config.max_model_len or 1)
    weights, cache, states = shape.weights(config), shape.cache(config), shape.states(config) + stepped_bytes(config, shape)
    graphs, kept = graph_bytes(config, shape) + buffer_bytes(config, shape), drafters_bytes(config)
    moved = _MOVED_BY_INT8 if config.dtype == "int8" and config.by_torchao else 1
    reading, reading_many = (moved * shape.read_per_pass(config, rows) / kind.bandwidth for rows in (1, MANY_ROWS))
    in_fp8 = config.dtype == "fp8" and config.by_torchao
    multiplying = 2 * shape.multiplied(config) * MANY_ROWS / (kind.arithmetic * (2 if in_fp8 else 1))
    return GpuPlan(
        weights=weights,
        cache=cache,
        cache_tokens=config.cache_tokens,
        states=states,
        drafters=drafters + kept,
        graphs=_CONTEXT_BYTES + graphs,
        free=free - weights - cache - states - graphs - kept,
        step_s=reading + _gathering(config, shape, kind, 1),
        gather_s=_gathering(config, shape, kind, 1),
        many_s=max(reading_many, multiplying) + _gathering(config, shape, kind, MANY_ROWS),
    )


def _gathering(config: TargetConfig, shape: Shape, kind: GpuKind, rows: int) -> float:
    """Seconds in which ranks exchange what they make of so many rows, in bfloat16, in all layers."""
    if config.tensor_parallel_size == 1:
        return 0.0
    return shape.gathers.seconds(rows, config.tensor_parallel_size, each_s=_GATHER_S, link=kind.link)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSplit:
    """A target on all GPUs: ``replicas``, each of which has ``ranks`` of each of ``stages``; ``plan`` is one replica's."""

    ranks: int
    stages: int
    plan: GpuPlan
    replicas: int = 1

    @override
    def __str__(self) -> str:
        """Such as 4 ranks x 2 stages, or 8 replicas of one GPU."""
        if self.replicas > 1 and self.ranks == self.stages == 1:
            return f"{self.replicas} replicas of one GPU"
        one = f"{self.ranks} rank{'s' * (self.ranks > 1)} x {self.stages} stage{'s' * (self.stages > 1)}"
        return one if self.replicas == 1 else f"{self.replicas} replicas of {one}"

    @property
    def one(self) -> float:
        """Tokens per second of one request, at most."""
        return 1 / self.plan.step_s

    @property
    def many(self) -> float:
        """Tokens per second of all replicas with ``MANY_ROWS`` requests each, at most."""
        return self.replicas * MANY_ROWS / self.plan.many_s


def splits_of(
    config: TargetConfig,
    shape: Shape,
    kind: GpuKind,
    count: int,
    sizes: Mapping[str, Any],
    drafters: float = 0.0,
    replicas: int | None = None,
) -> list[GpuSplit]:
    """All ways to use ``count`` GPUs by which the target fits, the fastest for one request first.

    Of those that are as fast the first is the one that makes most of many requests.

    Args:
        config: whose stages and ranks are a replica's, if it has more than one; else they are chosen.
        sizes: fields of the model's configuration.
        drafters: see ``size_up``.
        replicas: None: they are chosen as well.

    Raises:
        ConfigurationError: it fits in no way; says what would.
    """
    found, refusal = [], None
    for copies, ranks, stages in _divided(config, count, replicas):
        if stages > max(1, shape.layers):
            continue
        split = replace(config, stages=stages, tensor_parallel_size=ranks)
        try:
            _check_ranks(split, sizes)
            plan = size_up(split, shape, kind, drafters)
            found.append(GpuSplit(ranks=ranks, stages=stages, replicas=copies, plan=plan))
        except ConfigurationError as error:
            # Of one replica with one rank, which may have any stages, it says most.
            refusal = refusal or error
    if not found:
        raise refusal or ConfigurationError(
            f"the model has {shape.layers} layers, for a stage each", field="--gpus", value=count
        )
    same = _SAME * min(split.plan.step_s for split in found)

    def slower(split: GpuSplit) -> tuple[float, float]:
        # To a tenth of a millisecond: more is not known on paper.
        return 0.0 if split.plan.step_s <= same else round(split.plan.step_s, 4), -split.many

    return sorted(found, key=slower)


def _divided(config: TargetConfig, count: int, replicas: int | None) -> Iterator[tuple[int, int, int]]:
    """Replicas, ranks and stages that use ``count`` GPUs, few replicas and few ranks first."""
    for copies in range(1, count + 1) if replicas is None else (replicas,):
        each, left = divmod(count, copies)
        if left:
            continue
        if config.processes > 1:
            if config.processes == each:
                yield copies, config.tensor_parallel_size, config.stages
            continue
        for ranks in range(1, min(each, _MOST_RANKS) + 1):
            if each % ranks == 0:
                yield copies, ranks, each // ranks


def _check_ranks(config: TargetConfig, sizes: Mapping[str, Any]) -> None:
    """Check that ranks on GPUs can serve a model of these sizes.

    Raises:
        ConfigurationError: they cannot.
    """
    from services.verifier.config import check_backends
    from services.verifier.loading.cut_layers import check_cut
    from services.verifier.loading.rank_sizes import check_rank_sizes

    if config.tensor_parallel_size > 1:
        check_backends(replace(config, attention_backend="triton"))
        check_cut(str(sizes.get("model_type")), config.tensor_parallel_size)
        check_rank_sizes(config.tensor_parallel_size, sizes)


def reasons(splits: Sequence[GpuSplit], name: str = "") -> Iterator[str]:
    """Why the first split was chosen, and what it asks of the settings.

    Args:
        name: of the GPUs, one of ``GPUS``.
    """
    best = splits[0]
    if len(splits) > 1:
        others = ", ".join(f"{each}: {each.one:.0f} and {each.many:,.0f}" for each in splits if _has_its_use(each, splits))
        yield (
            f"chosen as the fastest for one request of what fits; tokens/s of one, and of {MANY_ROWS} in each replica, by "
            f"{others}"
        )
    if best.ranks > 1:
        yield (
            f"of a pass, {1e3 * best.plan.gather_s:.1f} ms are the ranks' exchanges: {1e6 * _GATHER_S:.0f} us each and what "
            "their bytes take"
        )
        if name in GPUS and GPUS[name].link < _FAST_LINK:
            yield (
                f"warning: {name} have no fast link to each other (NVLink): exchanges are "
                f"{100 * best.plan.gather_s / best.plan.step_s:.0f}% of a pass of one row; stages and replicas exchange less"
            )
    settings = ["verifier.device: cuda"]
    settings += [f"verifier.replicas: {best.replicas}"] if best.replicas > 1 else []
    settings += [f"verifier.stages: {best.stages}"] if best.stages > 1 else []
    if best.ranks > 1:
        settings += [f"verifier.tensor_parallel_size: {best.ranks}"]
        settings += ["verifier.attention_backend: triton"]
    yield f"settings: {', '.join(settings)}, and verifier.num_gpus: 1"


def _has_its_use(split: GpuSplit, splits: Sequence[GpuSplit]) -> bool:
    """Whether no other is faster for many requests and as fast for one."""
    return not any(other.many > split.many and _SAME * other.one >= split.one for other in splits)


def sentence(best: GpuSplit, count: int, name: str) -> str:
    """The plan in words."""
    found = best.plan
    parts = [f"{found.weights / _GB:.1f} GB of weights", f"{found.cache / _GB:.1f} of cache ({found.cache_tokens:,} tokens)"]
    parts += [f"{found.states / _GB:.1f} of states of requests, prefixes and branches"] if found.states else []
    parts += [f"{found.drafters / _GB:.1f} of drafters"] if found.drafters else []
    parts += [f"{found.graphs / _GB:.1f} of graphs, buffers and CUDA"]
    split = f" as {best}" if count > 1 else ""
    together = f"{MANY_ROWS} together" if best.replicas == 1 else f"{best.replicas} x {MANY_ROWS} together"
    return (
        f"{count} x {name}{split}, on paper: {', '.join(parts)} on the fullest GPU, {found.free / _GB:.1f} left; a pass "
        f"takes at least {1e3 * found.step_s:.1f} ms, {1e3 * found.many_s:.1f} with {MANY_ROWS} rows: plain decoding gives "
        f"one request at most {best.one:.0f} tokens/s, {together} {best.many:,.0f}"
    )
