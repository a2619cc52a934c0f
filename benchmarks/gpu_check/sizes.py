"""How large what the gates run is: Llama 3.1 8B's shape on a GPU, next to nothing on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.attention_gate import ROUNDED, SHAPES
from benchmarks.gpu_check.layer_gate import COMPARED, TIMED
from benchmarks.gpu_check.model_gates import PASSES, Pass
from benchmarks.gpu_check.state_gate import kinds_of
from benchmarks.inflate import Size


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSizes:
    """What the gates are given.

    Attributes:
        lengths: tokens for which each of the model's requests has room.
        dtype: of the models.
        copied, side: numbers that G1 copies, and the side of the squares that it multiplies.
        compared, timed: rows of layers in G2.
        attended: of G4, arguments of ``attention``.
        text: of G5 and G7, arguments of ``differing_rows`` and ``captured_passes``.
        passes: that G6 times.
        decoded: of G8, arguments of ``decoding``.
        drawn: of G9, arguments of ``drawing``.
        stepped: of G10, arguments of ``recurrences``.
    """

    model: Size
    vocabulary: int = 128256
    lengths: Sequence[int] = (4608, *[704] * 63)
    dtype: torch.dtype = torch.bfloat16
    copied: int = 2**30
    side: int = 8192
    compared: Sequence[int] = COMPARED
    timed: Sequence[int] = TIMED
    attended: dict[str, Any]
    text: dict[str, int]
    passes: Sequence[Pass] = PASSES
    decoded: dict[str, Any]
    drawn: dict[str, Any]
    stepped: dict[str, Any]

    @property
    def few_layers(self) -> Size:
        """Of the model with norms of heads."""
        return replace(self.model, layers=min(2, self.model.layers))


def llama_8b(layers: int) -> Size:
    """The dimensions of Llama 3.1 8B, with other layers."""
    return Size(width=4096, intermediate=14336, layers=layers, heads=32, kv_heads=8, head_size=128)


def sizes_on(device: str, layers: int) -> CheckSizes:
    """The sizes for a device; ``layers``: of the model on a GPU."""
    if device == "cpu":
        return CheckSizes(
            model=Size(width=48, intermediate=40, layers=1, heads=3, kv_heads=1, head_size=16), vocabulary=40,
            lengths=(384, 128), dtype=torch.float32, copied=2**16, side=64, compared=(1, 17, 32), timed=(),
            attended={"length": 24, "depth": 3, "others": 3, "shapes": [(2, 16, None)], "rounded": [(2, 16, None)]},
            text={"length": 9, "depth": 2, "others": 2, "vocabulary": 40}, passes=((1, 256, 1), (64, 256, 1)),
            decoded={"requests": (1, 2), "prompt": 5, "steps": 2, "vocabulary": 40},
            drawn={"draws": 150, "vocabulary": 20},
            stepped={"length": 9, "depth": 3, "others": 2, "kinds": partial(kinds_of, width=32, size=16)},
        )  # fmt: skip
    return CheckSizes(
        model=llama_8b(layers), attended={"shapes": SHAPES, "rounded": ROUNDED}, text={}, decoded={}, drawn={}, stepped={}
    )
