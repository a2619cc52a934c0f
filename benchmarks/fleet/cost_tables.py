"""What a pass costs on machines of several kinds, as the type that the engine's budget uses.

Of each table it is said where it comes from: measured here, measured by others, or computed from the limits of a chip. No
pass of Outrider has been timed on a fleet's GPUs yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.model_files.folder import one_line
from speculation.costs import CostTable
from speculation.errors import ConfigurationError

# H100 SXM by its data sheet: bytes per second of HBM3, and bfloat16 operations per second (dense).
_H100_BYTES, _H100_FLOPS = 3.35e12, 989e12
# Shares of it that are reached. vLLM and SGLang get 59 to 71 % of the memory's limit in single streams of an 8B model on an
# H100 (silybench, gpustack); large bfloat16 products some 60 % of the arithmetic within a model.
_BYTES_SHARE, _FLOPS_SHARE = 0.66, 0.60
# Rows for which tables have entries; between them, and beyond, costs are on straight lines.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Of a model, in bfloat16: what decides the limits of its passes.

    Attributes:
        weights: parameters that a token's pass reads, the embedding table left out.
        layers: with attention.
        kv_width: numbers that a token keeps in each layer, keys and values together.
        query_width: heads times their width.
    """

    weights: float
    layers: int
    kv_width: int
    query_width: int


SHAPES = {
    "8b": ModelShape(weights=7.57e9, layers=36, kv_width=2 * 8 * 128, query_width=32 * 128),
    "24b": ModelShape(weights=22.9e9, layers=40, kv_width=2 * 8 * 128, query_width=32 * 128),
    "70b": ModelShape(weights=69.5e9, layers=80, kv_width=2 * 8 * 128, query_width=64 * 128),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A verifier: the model it serves, on what, and how it is set.

    Attributes:
        costs: seconds of a pass over all layers.
        source: where ``costs`` comes from.
        gpus: that one verifier has: each holds one stage.
        max_num_seqs: as the setting, as are the next four.
        hop_s: seconds from one stage to the next.
    """

    name: str
    costs: CostTable
    source: str
    gpus: int = 1
    max_num_seqs: int = 64
    max_waiting: int = 256
    kv_cache_tokens: int = 131_072
    max_batched_tokens: int = 1024
    max_step_s: float = 0.2
    hop_s: float = 0.0


def roofline(shape: ModelShape) -> CostTable:
    """Limits of an H100: reading the weights or multiplying by them, whichever takes longer, plus the keys and values."""
    read_s = 2 * shape.weights / (_H100_BYTES * _BYTES_SHARE)
    row_s = 2 * shape.weights / (_H100_FLOPS * _FLOPS_SHARE)
    return CostTable(
        by_rows={rows: max(read_s, rows * row_s) for rows in _ROWS},
        per_request=0.0,
        per_key=2 * shape.layers * shape.kv_width / (_H100_BYTES * _BYTES_SHARE),
        per_row_key=4 * shape.layers * shape.query_width / (_H100_FLOPS * _FLOPS_SHARE),
    )


def _on_h100(size: str, tokens: int, gpus: int = 1) -> Hardware:
    over = f" over {gpus} stages, of which each is one H100" if gpus > 1 else ""
    return Hardware(
        name=f"{size}-h100",
        costs=roofline(SHAPES[size]),
        source=f"computed: a {size.upper()} model in bfloat16{over}, {_BYTES_SHARE:.0%} of an H100's 3.35 TB/s and "
        f"{_FLOPS_SHARE:.0%} of its 989 TFLOP/s; not measured",
        gpus=gpus,
        max_num_seqs=64 * gpus,
        kv_cache_tokens=tokens,
        hop_s=0.0005 if gpus > 1 else 0.0,
    )


def _measured_by_others() -> Hardware:
    seconds = {1: 6.83, 4: 6.92, 16: 7.14, 32: 7.40, 64: 8.15, 128: 9.34, 256: 12.8, 512: 21.6}
    own = roofline(SHAPES["8b"]).as_object()
    by_rows = {str(rows): milliseconds / 1e3 for rows, milliseconds in seconds.items()}
    return Hardware(
        name="8b-h100-vllm",
        costs=CostTable.from_object(own | {"by_rows": by_rows, "per_row_key": own["per_row_key"]}),
        source="measured by others: vLLM 0.30, Qwen3-8B in bfloat16 on an H100 (silybench), decoding rows; keys computed",
        kv_cache_tokens=327_680,
    )


def _measured_here() -> Hardware:
    by_rows = {1: 4.96, 2: 5.23, 4: 6.15, 8: 9.32, 16: 15.7, 32: 26.6, 64: 50.4, 128: 143.3}
    return Hardware(
        name="135m-cpu",
        costs=CostTable(
            by_rows={rows: milliseconds / 1e3 for rows, milliseconds in by_rows.items()},
            per_request=0.0,
            per_key=2.28e-6,
            per_row_key=3.42e-7,
        ),
        source="measured here, by the verifier: SmolLM2-135M-Instruct as stored (Q4_1), two cores of an AMD EPYC (Zen 5)",
        max_num_seqs=16,
        kv_cache_tokens=32_768,
        max_batched_tokens=256,
        max_step_s=0.5,
    )


# 85 GB of memory, 92 % of which may be used, less weights and 3 GB: what is left, in tokens.
KNOWN = {
    hardware.name: hardware
    for hardware in (
        _on_h100("8b", 393_216),
        _measured_by_others(),
        _on_h100("24b", 163_840),
        _on_h100("70b", 458_752, gpus=4),
        _measured_here(),
    )
}


def hardware_of(name: str) -> Hardware:
    """One of ``KNOWN``, or a file that a verifier has written (its cost table), which then stands for one H100.

    Raises:
        ConfigurationError: there is no such table.
    """
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name)
    try:
        content = json.loads(path.read_text())
        costs = CostTable.from_object(content.get("measured", content))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            field="--costs",
            value=name,
            allowed=f"one of {', '.join(KNOWN)}, or a file with a verifier's cost table ({one_line(error, path)})",
        ) from error
    return Hardware(name=path.stem, costs=costs, source=f"measured: {path}")
