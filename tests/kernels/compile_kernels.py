"""Compiles the kernels for GPUs that need not be here, and prints one JSON object per kernel: ``python -m tests.kernels.compile_kernels``.

They are specialised as at a launch: for addresses and sizes that are multiples of 16, memory is copied in the background, and
takes more shared memory. Run it with TRITON_INTERPRET=0: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.runtime.jit import MockTensor

from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device import (
    convolved_rows,
    expert_rows,
    gated_norm,
    keyed_steps,
    noisy_rows,
    rotate_write,
    round_rows,
    row_matmul,
    row_norm,
    tree_attend,
    vector_steps,
    write_rows,
)
from services.verifier.kernels.triton.pass_shape import warps_of
from services.verifier.kernels.triton.row_products import Tiles
from services.verifier.kernels.triton.row_steps import CHANNELS, WALKED_CHANNELS, columns_of
from tests.kernels.triton_compiler import compile_for, taken_by

HALF, SINGLE, DOUBLE, INT, LONG = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
# Numbers as they are in models of today. Strides are those of eight heads of 128; of others they are multiples of 16, too.
POOL = {
    **dict.fromkeys(("keys", "values", "key_scales", "value_scales"), HALF), "meta": INT,
    "key_strides": (65536, 1, 8192, 128), "value_strides": (65536, 128, 8192), "BYTES": False,
}  # fmt: skip
# In bytes: as they are stored, and as they are read, in pairs.
SCALED = {**POOL, "key_scales": SINGLE, "value_scales": SINGLE, "BYTES": True}
STORED = {**SCALED, "keys": torch.uint8, "values": torch.uint8}
PAIRED = {
    **SCALED, "keys": torch.int16, "values": torch.int16, "key_strides": (32768, 1, 4096, 64),
    "value_strides": (32768, 64, 4096),
}  # fmt: skip
SUMS = dict.fromkeys(("tops", "totals", "partial", "sinks"), SINGLE) | {"made": HALF, "unit": 0.125}
ATTEND = {
    **POOL, **SUMS, "query": HALF, "query_strides": (128, 4096), "cap": (1.0, 1.0), "sums_at": 6, "blocks_at": 9,
    "work_at": 21,
}  # fmt: skip
MULTIPLY = {
    "rows": HALF, "weight": HALF, "scales": SINGLE, "bias": HALF, "count": 3, "columns": 6144, "leaf": 2048, "terms": 4096,
    "apart": 4096,
}  # fmt: skip
PAIRS = {**MULTIPLY, "weight": torch.int16, "apart": 2048}
# Of Qwen3-30B-A3B: gate and up of 128 experts; of gpt-oss with biases, gate and up; of DeepSeek-V3, down of 256 experts.
LISTS = {"pairs": INT, "blocks": INT}
QWEN3_EXPERTS, GPT_OSS_EXPERTS, DEEPSEEK_EXPERTS = (
    {**MULTIPLY, **LISTS, "made": HALF, "columns": columns, "leaf": leaf, "terms": terms, "apart": terms}
    for columns, leaf, terms in ((768, 256, 2048), (5760, 384, 2880), (7168, 256, 2048))
)
for experts in (QWEN3_EXPERTS, GPT_OSS_EXPERTS, DEEPSEEK_EXPERTS):
    del experts["count"]
ROUTER = {**MULTIPLY, **dict.fromkeys(("rows", "weight", "bias", "made"), SINGLE), "columns": 256, "leaf": 896, "terms": 7168,
          "apart": 7168}  # fmt: skip


def tiles(given: dict[str, Any], rows: int, *, gated: bool, size: int) -> dict[str, int]:
    """The constants of a product of so many rows, as it is launched."""
    made = Tiles.of(rows, given["leaf"], gated=gated, size=size)
    return {"ROWS": made.rows, "COLUMNS": made.columns, "TERMS": made.terms, "num_stages": made.stages}


WHOLE, FP8, INT8 = ({"BYTES": shift is not None, "SHIFT": shift or 0} for shift in (None, 4, 0))
NORM = dict.fromkeys(("bias", "residual", "weight", "total", "made"), HALF) | {"eps": 1e-6, "apart": 12288}
ROTATE = {
    **POOL, **dict.fromkeys(("bias", "cosine", "sine", "of_query", "of_key", "queries"), HALF), "turn_stride": 128,
    "apart": 18432, "eps": 1e-6, "slots_at": 3,
}  # fmt: skip
ROUND = {"rows": HALF, "made": HALF, "scale": 0.03, "zero": -9.0, "global_scale": 300.0}
WHOLE_CODES = {"LOW": -128.0, "HIGH": 127.0, "FLOATS": False, "STORED": False, "FOUR_BITS": False, "POWER": 0}
FP8_CODES = {"LOW": -448.0, "HIGH": 448.0, "FLOATS": True, "STORED": False, "FOUR_BITS": False, "POWER": 0}
FOUR_BITS = {"LOW": -6.0, "HIGH": 6.0, "FLOATS": True, "STORED": False, "FOUR_BITS": True, "POWER": 0}
# MXFP4: the greatest power of two among its codes is the second.
POWERS = {**FOUR_BITS, "POWER": 2}
GREATEST = {"places": LONG, "tops": SINGLE, "firsts": LONG, "count": 128256, "parts": 63}
NOISE = {
    "limits": DOUBLE, "keys": LONG, "tops": DOUBLE, "ids": LONG, "seconds": DOUBLE, "vocabulary": 128256, "parts": 126, "first": 16032,
}  # fmt: skip
ALL_SIGHTS = {"WINDOW": 300, "CHUNK": 64, "SINKS": True}
NONE = {"WINDOW": 0, "CHUNK": 0, "SINKS": False}

WALKED = dict.fromkeys(("states", "places", "made"), SINGLE) | {"walk": INT, "steps_at": 5}
STEPPED = {
    **WALKED, **dict.fromkeys(("keys", "queries", "values", "factors", "times", "decay", "parts"), SINGLE), "key_stride": 2048,
    "query_stride": 2048, "value_stride": 8256, "factor_stride": 32, "time_stride": 4096, "part_stride": 32,
}  # fmt: skip
CONVOLVED = {
    "given": SINGLE, "states": SINGLE, "walk": INT, "row_stride": 8192, "channels": 8192, "links_at": 11,
}  # fmt: skip
GATED_NORM = {**dict.fromkeys(("rows", "gates", "weight", "made"), HALF), "eps": 1e-6}


def stepped(heads: int, key_heads: int, keys: int, values: int, by: int, *, parted: bool) -> dict[str, Any]:
    """The constants of states with so many keys and values, as they are launched."""
    return {
        "HEADS": heads, "KEY_HEADS": key_heads, "KEY": keys, "KEYS": 1 << (keys - 1).bit_length(), "VALUE": values,
        "COLUMNS": columns_of(keys), "BY": by, "PARTED": parted, "num_warps": 1,
    }  # fmt: skip


def head(size: int) -> dict[str, int]:
    return {"KEY": size, "KEYS": 1 << (size - 1).bit_length(), "VALUE": size, "VALUES": 1 << (size - 1).bit_length()}


KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "few rows": (tree_attend.attend, ATTEND, {
        "SHARE": 3, "HEADS": 63, "BLOCK": 16, "CAPPED": False, "SPLIT": True, **head(64), **NONE,
    }),
    "many rows": (tree_attend.attend, ATTEND, {
        "SHARE": 4, "HEADS": 32, "BLOCK": 64, "CAPPED": False, "SPLIT": True, **head(128), **NONE,
    }),
    "few rows of wide heads": (tree_attend.attend, ATTEND, {
        "SHARE": 2, "HEADS": 16, "BLOCK": 16, "CAPPED": True, "SPLIT": True, **head(256), **ALL_SIGHTS,
    }),
    "many rows of wide heads": (tree_attend.attend, ATTEND, {
        "SHARE": 2, "HEADS": 16, "BLOCK": 64, "CAPPED": True, "SPLIT": False, **head(256), **ALL_SIGHTS,
        "num_warps": warps_of(64, 256, split=False),
    }),
    "everything": (tree_attend.attend, ATTEND, {
        "SHARE": 7, "HEADS": 28, "BLOCK": 64, "CAPPED": True, "SPLIT": False, **head(80), **ALL_SIGHTS,
        "num_warps": warps_of(64, 128, split=False),
    }),
    "few rows of bytes": (tree_attend.attend, {**ATTEND, **PAIRED}, {
        "SHARE": 4, "HEADS": 32, "BLOCK": 16, "CAPPED": False, "SPLIT": True, **head(128), **NONE,
    }),
    "many rows of bytes": (tree_attend.attend, {**ATTEND, **PAIRED}, {
        "SHARE": 4, "HEADS": 32, "BLOCK": 64, "CAPPED": False, "SPLIT": True, **head(128), **NONE,
    }),
    "merge": (tree_attend.merge, {**SUMS, "meta": INT, "sums_at": 6}, {
        "HEADS": 32, "VALUE": 80, "VALUES": 128, "num_warps": 1, **ALL_SIGHTS,
    }),
    "merge of wide heads": (tree_attend.merge, {**SUMS, "meta": INT, "sums_at": 6}, {
        "HEADS": 16, "VALUE": 256, "VALUES": 256, "num_warps": 1, **ALL_SIGHTS,
    }),
    "write": (write_rows.write_rows, {
        **POOL, "key": HALF, "value": HALF, "in_strides": (128, 6144, 128, 6144), "slots_at": 3,
    }, head(80)),
    "write of bytes": (write_rows.write_rows, {
        **STORED, "key": HALF, "value": HALF, "in_strides": (128, 6144, 128, 6144), "slots_at": 3,
    }, head(128)),
    "rotate": (rotate_write.rotate_write, {**ROTATE, "product": HALF}, {
        **head(80), "HEADS": 28, "KV_HEADS": 4, "TURNED": 40, "PARTS": 0, "BIAS": False, "NORMED": False, "ROUNDED": False,
        "BLOCK": 1024,
    }),
    "rotate leaves": (rotate_write.rotate_write, {**ROTATE, "product": SINGLE}, {
        **head(128), "HEADS": 32, "KV_HEADS": 8, "TURNED": 128, "PARTS": 2, "BIAS": True, "NORMED": False, "ROUNDED": False,
        "BLOCK": 1024,
    }),
    "rotate to bytes": (rotate_write.rotate_write, {**ROTATE, **STORED, "product": SINGLE}, {
        **head(128), "HEADS": 32, "KV_HEADS": 8, "TURNED": 128, "PARTS": 2, "BIAS": True, "NORMED": False, "ROUNDED": False,
        "BLOCK": 1024,
    }),
    "rotate wide normed": (rotate_write.rotate_write, {**ROTATE, "product": HALF}, {
        **head(256), "HEADS": 16, "KV_HEADS": 8, "TURNED": 256, "PARTS": 0, "BIAS": False, "NORMED": True, "ROUNDED": True,
        "BLOCK": 1024,
    }),
    "few products": (row_matmul.multiply, {**MULTIPLY, "made": SINGLE}, {
        "PARTS": 2, "BIAS": False, "GATED": False, **tiles(MULTIPLY, 16, gated=False, size=2), **WHOLE,
    }),
    "some products": (row_matmul.multiply, {**MULTIPLY, "made": HALF}, {
        "PARTS": 1, "BIAS": False, "GATED": True, **tiles(MULTIPLY, 32, gated=True, size=2), **WHOLE,
    }),
    "many products": (row_matmul.multiply, {**MULTIPLY, "made": HALF}, {
        "PARTS": 1, "BIAS": True, "GATED": False, **tiles(MULTIPLY, 64, gated=False, size=2), **WHOLE,
    }),
    "gated products": (row_matmul.multiply, {**MULTIPLY, "made": HALF}, {
        "PARTS": 1, "BIAS": False, "GATED": True, **tiles(MULTIPLY, 64, gated=True, size=2), **WHOLE,
    }),
    "few products of fp8": (row_matmul.multiply, {**PAIRS, "made": SINGLE}, {
        "PARTS": 2, "BIAS": False, "GATED": False, **tiles(PAIRS, 16, gated=False, size=1), **FP8,
    }),
    "few products of int8": (row_matmul.multiply, {**PAIRS, "made": SINGLE}, {
        "PARTS": 2, "BIAS": False, "GATED": False, **tiles(PAIRS, 16, gated=False, size=1), **INT8,
    }),
    "some products of fp8": (row_matmul.multiply, {**PAIRS, "made": HALF}, {
        "PARTS": 1, "BIAS": False, "GATED": True, **tiles(PAIRS, 32, gated=True, size=1), **FP8,
    }),
    "many products of fp8": (row_matmul.multiply, {**PAIRS, "made": HALF}, {
        "PARTS": 1, "BIAS": True, "GATED": False, **tiles(PAIRS, 64, gated=False, size=1), **FP8,
    }),
    "gated products of fp8": (row_matmul.multiply, {**PAIRS, "made": HALF}, {
        "PARTS": 1, "BIAS": False, "GATED": True, **tiles(PAIRS, 64, gated=True, size=1), **FP8,
    }),
    "many products of int8": (row_matmul.multiply, {**PAIRS, "made": HALF}, {
        "PARTS": 1, "BIAS": True, "GATED": False, **tiles(PAIRS, 64, gated=False, size=1), **INT8,
    }),
    "few pairs": (expert_rows.multiply_pairs, QWEN3_EXPERTS, {
        "TOP": 8, "BIAS": False, "GATED": True, **tiles(QWEN3_EXPERTS, 16, gated=True, size=2), **WHOLE,
    }),
    "few pairs with biases": (expert_rows.multiply_pairs, GPT_OSS_EXPERTS, {
        "TOP": 4, "BIAS": True, "GATED": False, **tiles(GPT_OSS_EXPERTS, 16, gated=False, size=2), **WHOLE,
    }),
    "some pairs": (expert_rows.multiply_pairs, QWEN3_EXPERTS, {
        "TOP": 8, "BIAS": False, "GATED": True, **tiles(QWEN3_EXPERTS, 32, gated=True, size=2), **WHOLE,
    }),
    "many pairs with biases": (expert_rows.multiply_pairs, GPT_OSS_EXPERTS, {
        "TOP": 4, "BIAS": True, "GATED": False, **tiles(GPT_OSS_EXPERTS, 64, gated=False, size=2), **WHOLE,
    }),
    "many pairs": (expert_rows.multiply_pairs, DEEPSEEK_EXPERTS, {
        "TOP": 1, "BIAS": False, "GATED": False, **tiles(DEEPSEEK_EXPERTS, 64, gated=False, size=2), **WHOLE,
    }),
    "gated pairs": (expert_rows.multiply_pairs, QWEN3_EXPERTS, {
        "TOP": 8, "BIAS": False, "GATED": True, **tiles(QWEN3_EXPERTS, 64, gated=True, size=2), **WHOLE,
    }),
    "few pairs of fp8": (expert_rows.multiply_pairs, {**QWEN3_EXPERTS, "weight": torch.int16, "apart": 1024}, {
        "TOP": 8, "BIAS": False, "GATED": True, **tiles(QWEN3_EXPERTS, 16, gated=True, size=1), **FP8,
    }),
    "gated pairs of fp8": (expert_rows.multiply_pairs, {**QWEN3_EXPERTS, "weight": torch.int16, "apart": 1024}, {
        "TOP": 8, "BIAS": False, "GATED": True, **tiles(QWEN3_EXPERTS, 64, gated=True, size=1), **FP8,
    }),
    "few pairs of int8": (expert_rows.multiply_pairs, {**DEEPSEEK_EXPERTS, "weight": torch.int16, "apart": 1024}, {
        "TOP": 1, "BIAS": False, "GATED": False, **tiles(DEEPSEEK_EXPERTS, 16, gated=False, size=1), **INT8,
    }),
    "list of pairs": (expert_rows.list_pairs, {
        "chosen": LONG, "pairs": INT, "blocks": INT, "count": 2048, "most": 256,
    }, {"EXPERTS": 256, "BINS": 512, "ROWS": 16}),
    "sum of pairs": (expert_rows.add_pairs, {
        "made": HALF, "chosen": LONG, "factors": SINGLE, "total": HALF, "columns": 7168,
    }, {"EXPERTS": 256, "TOP": 8, "TOPS": 8, "BLOCK": 1024}),
    "few products of a router": (row_matmul.multiply, ROUTER, {
        "PARTS": 8, "BIAS": False, "GATED": False, **tiles(ROUTER, 16, gated=False, size=4), **WHOLE,
    }),
    "many products of a router": (row_matmul.multiply, ROUTER, {
        "PARTS": 8, "BIAS": False, "GATED": False, **tiles(ROUTER, 64, gated=False, size=4), **WHOLE,
    }),
    "leaves": (row_matmul.add_parts, {
        "parts": SINGLE, "bias": HALF, "made": HALF, "numbers": 12288, "columns": 4096,
    }, {"PARTS": 8, "BLOCK": 1024, "BIAS": True}),
    "norm": (row_norm.add_and_normalise, {**NORM, "rows": HALF}, {
        "WIDTH": 4096, "BLOCK": 1024, "RESIDUAL": False, "ROUNDED": True, "PARTS": 0, "BIAS": False,
    }),
    "norm of leaves": (row_norm.add_and_normalise, {**NORM, "rows": SINGLE}, {
        "WIDTH": 4096, "BLOCK": 1024, "RESIDUAL": True, "ROUNDED": True, "PARTS": 2, "BIAS": True,
    }),
    "gate": (row_norm.gate, {"both": SINGLE, "made": HALF, "width": 14336, "apart": 86016}, {"BLOCK": 1024, "PARTS": 2}),
    "noise": (noisy_rows.noisy_rows, {
        **NOISE, "logits": SINGLE,
    }, {"STREAM": 0, "BLOCK": 256}),
    "noise of what is left": (noisy_rows.noisy_rows, {
        **NOISE, "logits": DOUBLE,
    }, {"STREAM": 2, "BLOCK": 256}),
    "greatest of parts": (noisy_rows.first_greatest, {**GREATEST, "numbers": HALF}, {
        "PLACED": False, "LAST": False, "BLOCK": 2048,
    }),
    "greatest of all": (noisy_rows.first_greatest, {**GREATEST, "numbers": SINGLE}, {
        "PLACED": True, "LAST": True, "BLOCK": 64,
    }),
    "rounding of rows": (round_rows.round_rows, ROUND, {"SIZE": 14336, "BLOCK": 1024, **WHOLE_CODES, "SYMMETRIC": False}),
    "rounding of parts": (round_rows.round_rows, ROUND, {"SIZE": 128, "BLOCK": 128, **FP8_CODES, "SYMMETRIC": True}),
    "rounding to four bits": (round_rows.round_rows, ROUND, {"SIZE": 16, "BLOCK": 16, **FOUR_BITS, "SYMMETRIC": True}),
    "rounding by powers of two": (round_rows.round_rows, ROUND, {"SIZE": 32, "BLOCK": 32, **POWERS, "SYMMETRIC": True}),
    # Qwen3-Next, Kimi Linear, Mamba-2 of 2.7 billion, Falcon-H1's large states, and Mamba of 2.8 billion.
    "delta rule": (keyed_steps.step_keyed, STEPPED, stepped(32, 16, 128, 128, keyed_steps.BY_ONE, parted=True)),
    "delta rule by key": (keyed_steps.step_keyed, STEPPED, stepped(32, 32, 128, 128, keyed_steps.BY_KEY, parted=True)),
    "scan": (keyed_steps.step_keyed, STEPPED, stepped(80, 1, 128, 64, keyed_steps.BY_ONE, parted=False)),
    "scan of large states": (keyed_steps.step_keyed, STEPPED, stepped(24, 1, 256, 128, keyed_steps.BY_ONE, parted=False)),
    "scan by number": (keyed_steps.step_keyed, STEPPED, stepped(1, 1, 16, 5120, keyed_steps.BY_NUMBER, parted=False)),
    "lengths": (keyed_steps.divide_by_lengths, {
        "vectors": SINGLE, "made": SINGLE, "row_stride": 8256, "epsilon": 1e-6,
    }, {"SIZE": 128, "SIZES": 128, "num_warps": 1}),
    # LFM2's, and Qwen3-Next's.
    "convolution of three": (convolved_rows.convolve, {
        **CONVOLVED, "weight": HALF, "bias": HALF, "made": SINGLE, "accepted": 3,
    }, {"BEFORE": 2, "BIAS": True, "BLOCK": CHANNELS}),
    "convolution of four": (convolved_rows.convolve, {
        **CONVOLVED, "weight": HALF, "bias": HALF, "made": SINGLE, "accepted": 3,
    }, {"BEFORE": 3, "BIAS": False, "BLOCK": CHANNELS}),
    "held inputs": (convolved_rows.hold_inputs, {**CONVOLVED, "ends_at": 17}, {"BEFORE": 3, "BLOCK": CHANNELS}),
    "gated steps": (vector_steps.step_gated, {
        **WALKED, "factors": SINGLE, "added": SINGLE, "factor_stride": 5120, "added_stride": 5120, "width": 2560,
    }, {"BLOCK": WALKED_CHANNELS, "num_warps": 1}),
    "means": (vector_steps.step_mean, {
        **WALKED, **dict.fromkeys(("keys", "values", "decay", "bonus"), SINGLE), "key_stride": 8192, "value_stride": 8192,
        "width": 4096,
    }, {"BLOCK": WALKED_CHANNELS, "num_warps": 1}),
    "gated norm of heads": (gated_norm.normalise_gated, GATED_NORM, {
        "WIDTH": 128, "GROUPS": 1, "BLOCK": 1024, "FIRST": False, "ROUNDED": True, "SIGMOID": False,
    }),
    "gated norm of groups": (gated_norm.normalise_gated, GATED_NORM, {
        "WIDTH": 5120, "GROUPS": 1, "BLOCK": 1024, "FIRST": True, "ROUNDED": True, "SIGMOID": False,
    }),
    "one product": (row_matmul.one_product, {"left": HALF, "right": HALF, "made": SINGLE}, {
        "ROWS": 64, "TERMS": 64, "COLUMNS": 64,
    }),
}  # fmt: skip


def compiled(name: str) -> Any:
    """One of ``KERNELS``, for the GPU that ``compile_for`` was told."""
    kernel, numbers, constants = KERNELS[name]
    given = {each: MockTensor(one) if isinstance(one, torch.dtype) else one for each, one in numbers.items()}
    return kernel.warmup(grid=(1,), **given, **constants, **COMPILED)


def main() -> None:
    """Compile all kernels for the compute capabilities named, such as 80 90."""
    for capability in map(int, sys.argv[1:]):
        compile_for(capability)
        for name in KERNELS:
            made = compiled(name)
            ptx = made.asm["ptx"]
            found = {
                **taken_by(made),
                "wgmma": ptx.count("wgmma.mma_async"),
                "mma": ptx.count("mma.sync"),
                # Reads of memory, at most, between one exponential and the next: they do not wait for each other.
                "ahead": max(part.count("ld.global") for part in ptx.split("ex2.")),
                # Reads of two bytes by a thread.
                "halves": len(re.findall(r"ld\.global[.\w:]*\.b16", ptx)),
                # Consecutive terms of a sum that a thread holds of an operand: two where their order is kept.
                "widths": sorted(set(map(int, re.findall(r"kWidth = (\d+)", made.asm["ttgir"])))),
            }
            print(json.dumps({"kernel": name, "capability": capability, **found}))


if __name__ == "__main__":
    main()
