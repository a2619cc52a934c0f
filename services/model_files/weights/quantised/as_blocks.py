"""Whole numbers with scales as GGUF's blocks, where these hold the same numbers: our kernels multiply by blocks as they are.

Blocks have no zero point of their own, and a scale in float16 for each 32 inputs.
"""

from __future__ import annotations

import torch

from services.model_files.weights.stored_blocks import BLOCK, StoredBlocks

# The blocks' type, and the numbers that it holds.
_KINDS = {"Q4_0": (-8, 7), "Q8_0": (-128, 127)}


def as_blocks(codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, size: int) -> StoredBlocks | None:
    """(code - zero point) x scale in blocks; None: no type holds these numbers.

    Args:
        codes: [outputs, inputs], whole numbers.
        zeros: [outputs, groups], whole numbers; or one for all.
        scales: [outputs, groups].
        size: inputs in a group.
    """
    halves = scales.half()
    zero = zeros if isinstance(zeros, int) else int(zeros.reshape(-1)[0])
    if size % BLOCK or not torch.equal(halves.float(), scales.float()) or not _all_are(zeros, zero):
        return None
    signed = codes.int() - zero
    least, most = int(signed.min()), int(signed.max())
    kind = next((kind for kind, (low, high) in _KINDS.items() if low <= least and most <= high), None)
    if kind is None:
        return None
    each = halves.repeat_interleave(size // BLOCK, 1)[..., None].view(torch.uint8)
    blocks = signed.view(*each.shape[:2], BLOCK)
    if kind == "Q4_0":
        # The upper halves of 16 bytes hold the second half of the block.
        low, high = (blocks + 8).byte().chunk(2, -1)
        numbers = low | (high << 4)
    else:
        numbers = blocks.char().view(torch.uint8)
    return StoredBlocks(torch.cat([each, numbers], -1).flatten(1).contiguous(), kind, codes.shape[1])


def _all_are(zeros: torch.Tensor | int, zero: int) -> bool:
    return isinstance(zeros, int) or bool((zeros == zero).all())


def likely_kind(bits: int, symmetric: bool, size: int, scales: str) -> str:
    """The type that ``as_blocks`` finds where nothing speaks against it; F32: none.

    Args:
        scales: safetensors' name of the scales' type. Of bfloat16, the smallest do not fit, which shows when they are read.
    """
    if not symmetric or size % BLOCK or scales not in ("F16", "BF16"):
        return "F32"
    return "Q4_0" if bits <= 4 else "Q8_0"
