"""Chooses the kernels for a model's linear layers on this CPU: the fastest exact ones, by measurement.

Candidates are our own kernels, over float32 weights and over weights as stored, and oneDNN's. They are timed for every shape
of layer, over as many rows as decoding, trees and prompts bring, and checked: a row's bits must not depend on the other
rows. torch's own layers, which transformers would use, are not exact; they are timed for comparison.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from services.machine.processor import processor
from services.model_files.weights.stored_blocks import (
    BLOCK,
    FLOATS,
    TABLES,
    StoredBlocks,
    Weight,
    halves_of,
    quantized,
    scales_of,
    sizes_of,
    stored_as,
)
from services.verifier.checks.kept_measurements import Kept, digest_of
from services.verifier.config import TargetConfig
from services.verifier.kernels.linears import MakeLinear, OneDnnLinear, as_float, products
from services.verifier.kernels.native.library import Library, library
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.kernels.parameters import in_blocks, multiplied
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

ROWS = (1, 8, 64, 256)

Run = Callable[[torch.Tensor], torch.Tensor]
# Finds our kernels by the name of an instruction set.
Find = Callable[[str], Library | None]
# Number of products by (outputs, inputs, stored type, experts).
Shapes = Mapping[tuple[int, int, str, int], int]
# Experts per row that are assumed; mixtures use two to eight.
_CHOSEN = 4
_REPEATS = 5
# The time of a layer is proportional to its size, so only a part of a larger one is timed.
_MOST_WEIGHTS = 2**22
_FORMAT = 1
_CLEARLY = 0.8
# Smaller models are so fast that timing is not worth it.
_TOO_SMALL = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What computes the linear layers, and why.

    Attributes:
        linears: ``native`` (our own kernels), ``onednn`` or ``torch``; on a GPU ``triton``, ``cublaslt`` or ``torch``.
        instructions: instruction set of our kernels, which also compute attention: avx512, avx2, neon, or empty.
        weights: ``float32`` or ``as_stored``.
        digest: identifies the compiled kernels; cost tables measured with others do not apply.
        milliseconds: for all layers together, by candidate, for each number of rows in ``ROWS``.
        reason: a sentence for the log.
    """

    linears: str
    instructions: str = ""
    weights: str = "float32"
    digest: str = ""
    milliseconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    reason: str = ""

    @property
    def about(self) -> list[str]:
        """What the cost of a pass depends on."""
        return [self.linears, self.instructions, self.weights, self.digest]

    @property
    def min_rows(self) -> int:
        """The smallest number of rows that a layer may get."""
        # For a single row, oneDNN and torch use another kernel, which rounds differently.
        return 1 if self.linears in ("native", "triton", "cublaslt") else 2


def choose_kernels(model: nn.Module, config: TargetConfig, find: Find = library, too_small: int = _TOO_SMALL) -> Choice:
    """The best choice that the settings allow: from the file of an earlier start, or by measurement, which takes about a
    second.

    Args:
        find: our kernels for an instruction set, see ``library``.
        too_small: a model of fewer weights takes the first candidate.

    Raises:
        ConfigurationError: the kernels named in the settings are not available here.
    """
    kernels = _native(config, find)
    candidates = _candidates(model, config, kernels)
    shapes = shapes_of(model)
    size = sum(outputs * inputs * experts * count for (outputs, inputs, _, experts), count in shapes.items())
    if len(candidates) == 1 or size < too_small:
        return candidates[0]
    kept = Kept(config.kernels_dir, _about(config, shapes, kernels))
    if (known := kept.read(lambda content: _known(content, candidates))) is not None:
        return known
    start = time.perf_counter()
    chosen = fastest_exact({name_of(choice): (choice, maker(choice)) for choice in candidates}, shapes)
    log.info("timed kernels in %.1f s: %s", time.perf_counter() - start, chosen.reason)
    kept.write(asdict(chosen))
    return chosen


def maker(choice: Choice, dtype: str = "float32") -> MakeLinear | None:
    """Makes a layer of the chosen kind; None: the layers stay torch's."""
    if choice.linears == "native":
        kernels = library(choice.instructions)
        assert kernels is not None
        return lambda weight, bias: NativeLinear(kernels, _in_form(weight, choice, dtype), bias)
    return OneDnnLinear if choice.linears == "onednn" else None


def _in_form(weight: Weight, choice: Choice, dtype: str) -> Weight:
    if dtype == "int8":
        return quantized(as_float(weight))
    # The kernels do not read float16, whose numbers are exact in float32.
    kept = isinstance(weight, StoredBlocks) or weight.dtype == torch.bfloat16
    return weight if choice.weights == "as_stored" and kept else as_float(weight)


def _native(config: TargetConfig, find: Find) -> Library | None:
    if config.kernels in ("onednn", "torch"):
        return None
    kernels = find(config.kernels)
    if kernels is None and config.kernels != "auto":
        raise ConfigurationError(
            "that needs a C compiler (cc) and a processor that has it; the log says what is missing; use auto",
            field="verifier.kernels",
            value=config.kernels,
        )
    return kernels


def check_named(config: TargetConfig, find: Find = library) -> None:
    """Check, before anything is loaded, that there are kernels of our own where settings name what they alone compute.

    Args:
        find: our kernels for an instruction set.

    Raises:
        ConfigurationError: there are none; names the setting.
    """
    if config.device == "cpu" and _native(config, find) is None:
        _refuse_what_needs_ours(config)


def _refuse_what_needs_ours(config: TargetConfig) -> None:
    if config.weights == "as_stored" or config.dtype == "int8":
        key, value = ("weights", "as_stored") if config.weights == "as_stored" else ("dtype", "int8")
        why = "on a CPU that needs a C compiler (cc); use float32"
        raise ConfigurationError(why, field=f"verifier.{key}", value=value)
    ranks, named = config.tensor_parallel_size, ("", "")
    if ranks > 1:
        named = "verifier.tensor_parallel_size", str(ranks)
    elif config.draft_adapter is not None:
        named = "drafter.models", str(config.draft_adapter)
    elif config.adapts:
        named = "verifier.lora_modules", "set"
    elif config.rounds_cache:
        named = "verifier.kv_cache_dtype", config.kv_cache_dtype
    if named != ("", ""):
        raise ConfigurationError(
            "that needs our kernels: a C compiler (cc) and a processor that has them; see the log",
            field=named[0],
            value=named[1],
        )


def _candidates(model: nn.Module, config: TargetConfig, kernels: Library | None) -> list[Choice]:
    """What the settings allow and this machine has. Without a measurement the first one is used."""
    found: list[Choice] = []
    compiled: dict[str, Any] = {} if kernels is None else {"instructions": kernels.name, "digest": kernels.digest}
    if kernels is not None:
        own: dict[str, Any] = {"linears": "native", **compiled}
        stored = {kind for _, _, kind, _ in shapes_of(model)}
        if config.weights != "float32" and (stored - {"float32", "float16"} or config.weights == "as_stored"):
            found.append(Choice(**own, weights="as_stored"))
        if config.weights != "as_stored":
            found.append(Choice(**own))
    else:
        _refuse_what_needs_ours(config)
    if config.tensor_parallel_size > 1 or config.adapts:
        # Others need not give a column the same bits beside other columns, and have no low-rank products.
        return found
    # Only our kernels read other stored types.
    if config.weights != "as_stored" and config.dtype != "int8" and config.kernels in ("auto", "onednn"):
        available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if available and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            found.append(Choice(linears="onednn", **compiled))
        elif config.kernels == "onednn":
            raise ConfigurationError("this build of torch has none; use auto", field="verifier.kernels", value="onednn")
    return found or [Choice(linears="torch")]


def shapes_of(model: nn.Module) -> Shapes:
    """The shapes of all products of linear layers and of parameters."""
    layers = [list(layers.values()) for _, layers in products(model)]
    found = Counter(
        (sum(one.out_features for one in some), some[0].in_features, stored_as(some[0].weight), 1) for some in layers
    )
    for _, _, parameter in multiplied(model):
        outputs, inputs = parameter.shape[-2:]
        found[outputs, inputs, stored_as(parameter), parameter.numel() // (outputs * inputs)] += 1
    for blocks in (blocks for module in model.modules() for _, blocks in in_blocks(module)):
        outputs, inputs, _ = blocks.form
        # Few experts are of another type than the others, if any.
        ((kind, _),) = Counter(map(stored_as, blocks.matrices)).most_common(1)
        found[outputs, inputs, kind, len(blocks.matrices)] += 1
    return found


def name_of(choice: Choice) -> str:
    """What a candidate is called in figures."""
    return f"{choice.instructions} {choice.weights}" if choice.linears == "native" else choice.linears


def fastest_exact(candidates: Mapping[str, tuple[Choice, MakeLinear | None]], shapes: Shapes) -> Choice:
    """The fastest of those whose rows do not depend on others; torch's layers where there is none.

    Args:
        candidates: by name, the first ones before those that are not clearly faster; and what makes their layers.
    """
    totals = {name: [0.0] * len(ROWS) for name in (*candidates, "torch")}
    inexact: set[str] = set()
    for (outputs, inputs, kind, experts), count in shapes.items():
        part = min(outputs, max(BLOCK, _MOST_WEIGHTS // inputs // BLOCK * BLOCK))
        weight = _sample(part, inputs, kind)
        plain = as_float(weight)
        makers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "torch": functools.partial(functional.linear, weight=plain)
        }
        for name, (choice, make) in candidates.items():
            assert make is not None
            layer = makers[name] = make(weight, None)
            if not _is_exact(layer, inputs, choice.min_rows):
                inexact.add(name)
        for index, rows in enumerate(ROWS):
            # Each expert that is chosen multiplies its share of the rows.
            hit = min(experts, rows * _CHOSEN)
            given = rows if experts == 1 else -(-rows * _CHOSEN // experts)
            for name, seconds in _seconds(makers, given, inputs).items():
                totals[name][index] += 1e3 * seconds * count * hit * outputs / part
    exact = [name for name in candidates if name not in inexact]
    best = candidates[clearly_fastest(exact, totals)][0] if exact else Choice(linears="torch")
    figures = {name: [round(value, 2) for value in values] for name, values in totals.items()}
    listed = "; ".join(f"{name} {'/'.join(f'{value:.1f}' for value in values)}" for name, values in figures.items())
    reason = f"fastest exact, ms over {'/'.join(map(str, ROWS))} rows: {listed}"
    reason += f"; not exact here: {', '.join(sorted(inexact))}" if inexact else ""
    return Choice(**{**asdict(best), "milliseconds": figures, "reason": reason})


def clearly_fastest(names: Sequence[str], milliseconds: Mapping[str, Sequence[float]]) -> str:
    """The candidate that takes least. Machines of a cluster should choose alike, so each stays unless a later one is clearly
    faster.

    Args:
        milliseconds: of each candidate, by numbers of rows.
    """
    best = names[0]
    for other in names[1:]:
        if _score(milliseconds[other]) < _CLEARLY * _score(milliseconds[best]):
            best = other
    return best


def _score(milliseconds: Sequence[float]) -> float:
    """Geometric mean, in which every number of rows has the same weight."""
    return math.prod(milliseconds) ** (1 / len(milliseconds))


def _sample(outputs: int, inputs: int, kind: str) -> Weight:
    """Random weights of a shape and type; their values do not change the time."""
    if kind in ("float32", "bfloat16", "float16"):
        return torch.randn(outputs, inputs, dtype=torch.float32).to(getattr(torch, kind))
    in_block, size = sizes_of(kind)
    raw = torch.randint(256, (outputs, -(-inputs // in_block), size), dtype=torch.uint8)
    if kind == FLOATS:
        # No NaN, which equals nothing.
        raw &= 0xFE
    if kind in TABLES:
        scales = raw[..., : 4 * scales_of(kind)]
        scales.copy_(torch.full((scales.shape[-1] // 4,), 0.01, dtype=torch.float32).view(torch.uint8))
    if kind == "MXFP4":
        # Powers of two that are no greater than floats.
        raw[..., 0] = 120
    halves = raw[..., halves_of(kind)]
    halves.copy_(torch.full((halves.shape[-1] // 2,), 0.01, dtype=torch.float16).view(torch.uint8))
    return StoredBlocks(raw.flatten(1), kind, inputs)


def _is_exact(layer: nn.Module, inputs: int, min_rows: int) -> bool:
    rows = torch.randn(40, inputs, dtype=torch.float32)
    together = layer(rows)
    return all(
        torch.equal(layer(rows[start : start + count]), together[start : start + count])
        for count in (min_rows, 3, 7, 13, 33)
        for start in (0, 5)
    )


def _seconds(makers: Mapping[str, Run], rows: int, inputs: int) -> dict[str, float]:
    """The shortest of several times for each. They take turns, so that disturbances on the machine affect all of them."""
    given, best = torch.randn(rows, inputs, dtype=torch.float32), dict.fromkeys(makers, math.inf)
    for _ in range(1 + _REPEATS):
        for name, run in makers.items():
            start = time.perf_counter()
            run(given)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _about(config: TargetConfig, shapes: Shapes, kernels: Library | None) -> dict[str, Any]:
    """Everything that the choice depends on."""
    return {
        "format": _FORMAT,
        "model": digest_of(config.model_path),
        "shapes": sorted([*shape, count] for shape, count in shapes.items()),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": [config.kernels, config.weights, config.dtype, "" if kernels is None else kernels.digest],
    }


def _known(content: Mapping[str, Any], candidates: Sequence[Choice]) -> Choice:
    """The choice of an earlier start.

    Raises:
        ValueError: it is not available here.
    """
    choice = Choice(**content)
    if name_of(choice) not in map(name_of, candidates):
        raise ValueError(f"{name_of(choice)} is not available here")
    return choice
