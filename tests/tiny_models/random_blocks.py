"""Random blocks of any of GGUF's types, also of those that the gguf package cannot quantise to."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

# Where a block's float16 numbers lie: its scale, and what its minima are scaled by.
_SCALE = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
_MINIMUM = {"Q4_1": 2, "Q5_1": 2, "Q2_K": 82, "Q4_K": 2, "Q5_K": 2}
# What scales a number beside them, about: the sizes of numbers with a sign, and of the block's own scales.
_TIMES = {
    "Q2_K": 8 * 2,
    "Q3_K": 16 * 2,
    "Q4_K": 32 * 8,
    "Q5_K": 32 * 16,
    "Q6_K": 64 * 16,
    "IQ4_XS": 16 * 64,
    "IQ4_NL": 64,
    "IQ3_S": 8 * 16,
    "Q5_0": 8,
    "Q5_1": 16,
}


def random_blocks(outputs: int, inputs: int, kind: str, size: float = 1.0, seed: int = 0) -> NDArray[np.uint8]:
    """[outputs, bytes per row]; all bits are random, but the blocks' scales are such that numbers are about ``size``."""
    source = np.random.default_rng(seed)
    width, count = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = source.integers(0, 256, (outputs, inputs // width, count), dtype=np.uint8)
    shape = blocks.shape[:2]
    if kind == "MXFP4":
        # A power of two for numbers up to 12.
        blocks[..., 0] = 127 + np.round(np.log2(size / 4)) + source.integers(-1, 2, shape)
        return blocks.reshape(outputs, -1)
    if kind == "NVFP4":
        # A float of a byte for each 16 numbers up to 6.
        blocks[..., :4] = quants.NVFP4.fp32_to_ue4m3(source.uniform(0.3, 2, (*shape, 4)) * size / 3)
        return blocks.reshape(outputs, -1)
    scales = source.uniform(0.3, 2, shape) * source.choice([-1, 1], shape) * size / _TIMES.get(kind, 8)
    halves = {_SCALE.get(kind, 0): scales}
    if kind in _MINIMUM:
        # The middle of the numbers; Q4_1's and Q5_1's is added, and no number scales it.
        halves[_MINIMUM[kind]] = -8 * scales if kind in ("Q4_1", "Q5_1") else np.abs(scales) * source.uniform(0.5, 2, shape)
    for at, numbers in halves.items():
        blocks[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)
