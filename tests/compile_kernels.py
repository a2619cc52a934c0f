"""Compiles the kernels for GPUs that need not be here, and prints one JSON object per kernel: ``python -m tests.compile_kernels``.

Run it with TRITON_INTERPRET=0: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.verifier.triton_kernels.device import (
    first_greatest,
    noisy_rows,
    one_product,
    rotate_write,
    row_matmul,
    row_norm,
    tree_attend,
    write_rows,
)
from services.verifier.triton_kernels.triton_pass import _COMPILED

HALF, SINGLE, INT = "*bf16", "*fp32", "i32"
POOL = {
    "keys": HALF, "values": HALF, "meta": "*i32", "key_strides": (INT,) * 3, "value_strides": (INT,) * 3,
}  # fmt: skip
SUMS = dict.fromkeys(("tops", "totals", "partial", "sinks"), SINGLE) | {"made": HALF, "unit": "fp32", "segments": INT}
ATTEND = {**POOL, **SUMS, "query": HALF, "query_strides": (INT,) * 2, "cap": ("fp32",) * 2, "blocks_at": INT}
MULTIPLY = {"rows": HALF, "weight": HALF, "bias": HALF} | dict.fromkeys(("count", "columns", "leaf", "terms"), INT)
NORM = dict.fromkeys(("bias", "residual", "weight", "total", "made"), HALF) | {"width": INT, "eps": "fp32", "apart": INT}
ROTATE = {
    **POOL, **dict.fromkeys(("bias", "cosine", "sine", "of_query", "of_key", "queries"), HALF), "turn_stride": INT,
    "apart": INT, "eps": "fp32", "slots_at": INT,
}  # fmt: skip
GREATEST = {"places": "*i64", "tops": SINGLE, "firsts": "*i64", "count": INT, "parts": INT}
ALL_SIGHTS = {"WINDOW": 300, "CHUNK": 64, "SINKS": True}
NONE = {"WINDOW": 0, "CHUNK": 0, "SINKS": False}


def head(size: int) -> dict[str, int]:
    return {"KEY": size, "KEYS": 1 << (size - 1).bit_length(), "VALUE": size, "VALUES": 1 << (size - 1).bit_length()}


KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "few rows": (tree_attend.attend, ATTEND, {
        "SHARE": 3, "HEADS": 63, "BLOCK": 16, "CAPPED": False, "SPLIT": True, **head(64), **NONE,
    }),
    "many rows": (tree_attend.attend, ATTEND, {
        "SHARE": 4, "HEADS": 32, "BLOCK": 64, "CAPPED": False, "SPLIT": True, **head(128), **NONE,
    }),
    "everything": (tree_attend.attend, ATTEND, {
        "SHARE": 7, "HEADS": 28, "BLOCK": 64, "CAPPED": True, "SPLIT": False, **head(80), **ALL_SIGHTS,
    }),
    "merge": (tree_attend.merge, {**SUMS, "meta": "*i32"}, {
        "HEADS": 32, "HEADS_PADDED": 1, "VALUE": 80, "VALUES": 128, **ALL_SIGHTS,
    }),
    "write": (write_rows.write_rows, {
        **POOL, "key": HALF, "value": HALF, "in_strides": (INT,) * 4, "slots_at": INT,
    }, head(80)),
    "rotate": (rotate_write.rotate_write, {**ROTATE, "product": HALF}, {
        **head(80), "HEADS": 28, "KV_HEADS": 4, "TURNED": 40, "LEAVES": 0, "BIAS": False, "NORMED": False, "ROUNDED": False,
        "BLOCK": 1024,
    }),
    "rotate leaves": (rotate_write.rotate_write, {**ROTATE, "product": SINGLE}, {
        **head(128), "HEADS": 32, "KV_HEADS": 8, "TURNED": 128, "LEAVES": 2, "BIAS": True, "NORMED": True, "ROUNDED": True,
        "BLOCK": 1024,
    }),
    "few products": (row_matmul.multiply, {**MULTIPLY, "made": SINGLE}, {
        "LEAVES": 3, "ROWS": 16, "COLUMNS": 64, "TERMS": 64, "BIAS": False, "SPLIT": True, "GATED": False,
    }),
    "many products": (row_matmul.multiply, {**MULTIPLY, "made": HALF}, {
        "LEAVES": 3, "ROWS": 128, "COLUMNS": 64, "TERMS": 64, "BIAS": True, "SPLIT": False, "GATED": False,
    }),
    "gated products": (row_matmul.multiply, {**MULTIPLY, "made": HALF}, {
        "LEAVES": 1, "ROWS": 128, "COLUMNS": 32, "TERMS": 64, "BIAS": False, "SPLIT": False, "GATED": True,
    }),
    "leaves": (row_matmul.add_leaves, {
        "parts": SINGLE, "bias": HALF, "made": HALF, "numbers": INT, "columns": INT,
    }, {"LEAVES": 3, "BLOCK": 1024, "BIAS": True}),
    "norm": (row_norm.add_and_normalise, {**NORM, "rows": HALF}, {
        "BLOCK": 1024, "RESIDUAL": False, "ROUNDED": True, "LEAVES": 0, "BIAS": False,
    }),
    "norm of leaves": (row_norm.add_and_normalise, {**NORM, "rows": SINGLE}, {
        "BLOCK": 1024, "RESIDUAL": True, "ROUNDED": True, "LEAVES": 2, "BIAS": True,
    }),
    "gate": (row_norm.gate, {"both": SINGLE, "made": HALF, "width": INT, "apart": INT}, {"BLOCK": 1024, "LEAVES": 2}),
    "noise": (noisy_rows.noisy_rows, {
        "logits": SINGLE, "limits": "*fp64", "keys": "*i64", "tops": "*fp64", "ids": "*i64", "seconds": "*fp64",
        "vocabulary": INT, "parts": INT,
    }, {"STREAM": 0, "BLOCK": 256}),
    "noise of what is left": (noisy_rows.noisy_rows, {
        "logits": "*fp64", "limits": "*fp64", "keys": "*i64", "tops": "*fp64", "ids": "*i64", "seconds": "*fp64",
        "vocabulary": INT, "parts": INT,
    }, {"STREAM": 2, "BLOCK": 256}),
    "greatest of parts": (first_greatest.first_greatest, {**GREATEST, "numbers": HALF}, {
        "PLACED": False, "LAST": False, "BLOCK": 2048,
    }),
    "greatest of all": (first_greatest.first_greatest, {**GREATEST, "numbers": SINGLE}, {
        "PLACED": True, "LAST": True, "BLOCK": 64,
    }),
    "one product": (one_product.one_product, {"left": HALF, "right": HALF, "made": SINGLE}, {
        "ROWS": 64, "TERMS": 64, "COLUMNS": 64,
    }),
}  # fmt: skip


def main() -> None:
    """Compile all kernels for the compute capabilities named, such as 80 90."""
    for capability in map(int, sys.argv[1:]):
        for name, (kernel, types, constants) in KERNELS.items():
            signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
            places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
            made = compiled(
                ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32), options=_COMPILED
            )
            ptx = made.asm["ptx"]
            found = {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "shared": made.metadata.shared}
            print(json.dumps({"kernel": name, "capability": capability, **found}))


if __name__ == "__main__":
    main()
