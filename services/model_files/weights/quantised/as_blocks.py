"""Whole numbers, or floats of a byte, with scales as blocks, where these hold the same numbers, which kernels multiply by.

Blocks have a scale in float16 for each 32 inputs. GGUF's have one zero point for all, ours one for each block, likewise; of
one type each half of a block has both.
Those of floats, and of codes of a table, have scales in float32.
"""

from __future__ import annotations

import torch

from services.model_files.weights.stored_blocks import BLOCK, FLOATS, IN_HALVES, WITH_ZEROS, StoredBlocks

HALF = BLOCK // 2
# GGUF's types, and the numbers that they hold.
_KINDS = {"Q4_0": (-8, 7), "Q8_0": (-128, 127)}


def as_blocks(codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, size: int) -> StoredBlocks | None:
    """(code - zero point) x scale in blocks; None: no type holds these numbers.

    Args:
        codes: [outputs, inputs], whole numbers.
        zeros: [outputs, groups], whole numbers or floats; or one for all.
        scales: [outputs, groups].
        size: inputs in a group.
    """
    halves, inputs = scales.half(), codes.shape[1]
    if not torch.equal(halves.float(), scales.float()):
        return None
    if size % BLOCK:
        return _with_zeros(codes, zeros, halves, size) if size % HALF == 0 == inputs % BLOCK else None
    zero = _of_all(zeros)
    if zero is not None and (made := _with_one_zero(codes.int() - zero, halves, size)) is not None:
        return made
    return None if isinstance(zeros, int) else _with_zeros(codes, zeros, halves, size)


def _of_all(zeros: torch.Tensor | int) -> int | None:
    """The zero point of all codes, if there is one that is whole."""
    if isinstance(zeros, int):
        return zeros
    first = float(zeros.reshape(-1)[0])
    return int(first) if first.is_integer() and bool((zeros == first).all()) else None


def _with_one_zero(signed: torch.Tensor, scales: torch.Tensor, size: int) -> StoredBlocks | None:
    least, most = int(signed.min()), int(signed.max())
    kind = next((kind for kind, (low, high) in _KINDS.items() if low <= least and most <= high), None)
    if kind is None:
        return None
    numbers = (signed + 8).byte() if kind == "Q4_0" else signed.char().view(torch.uint8)
    return _blocks(kind, numbers, [scales], size)


def _with_zeros(codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, size: int) -> StoredBlocks | None:
    if isinstance(zeros, int):
        zeros = torch.full_like(scales, zeros)
    # Codes of a byte have a sign.
    least = min(0, int(codes.min()))
    codes, zeros = codes.int() - least, zeros.float() - least
    kinds = {IN_HALVES: 4} if size % BLOCK else WITH_ZEROS
    kind = next((kind for kind, bits in kinds.items() if int(codes.max()) < 1 << bits), None)
    if kind is None or not _exact(zeros, kinds[kind]):
        return None
    return _blocks(kind, codes.byte(), [scales, zeros.half()], size)


def _exact(zeros: torch.Tensor, bits: int) -> bool:
    """Whether a float16 holds each zero point, and a float32 its difference from every code.

    The kernels compute code x scale - zero point x scale and round once. Where the difference is exact, so does the format.
    """
    if not torch.equal(zeros.half().float(), zeros):
        return False
    fine = zeros * float(1 << (23 - bits))
    return bool((zeros.abs() <= 1 << bits).all()) and torch.equal(fine, fine.round())


def _blocks(kind: str, numbers: torch.Tensor, halves: list[torch.Tensor], size: int) -> StoredBlocks:
    """Blocks of numbers in bytes, [outputs, inputs], behind what each group has in float16, [outputs, groups]."""
    blocks, part = numbers.reshape(len(numbers), -1, BLOCK), HALF if kind == IN_HALVES else BLOCK
    each = [
        one.repeat_interleave(size // part, 1).view(*blocks.shape[:2], -1).contiguous().view(torch.uint8) for one in halves
    ]
    if kind in ("Q4_0", "Q4_Z", IN_HALVES):
        blocks = _packed(blocks)
    return StoredBlocks(torch.cat([*each, blocks], -1).flatten(1).contiguous(), kind, numbers.shape[1])


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """[..., 16 bytes] of [..., 32 codes of four bits]: the upper halves of the bytes hold the second half of the block."""
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def codes_as_blocks(kind: str, codes: torch.Tensor, scales: torch.Tensor) -> StoredBlocks:
    """Codes of four bits with their scales in blocks.

    Args:
        kind: of ``TABLES``, or MXFP4.
        codes: [outputs, inputs], bytes, of whole blocks.
        scales: [outputs, one for each block, or for each of its halves if it has two], float32; of MXFP4 bytes.
    """
    outputs, inputs = codes.shape
    each = scales.contiguous().view(torch.uint8).view(outputs, inputs // BLOCK, -1)
    packed = _packed(codes.view(outputs, -1, BLOCK))
    return StoredBlocks(torch.cat([each, packed], -1).flatten(1), kind, inputs)


def floats_as_blocks(codes: torch.Tensor, scales: torch.Tensor, size: int) -> StoredBlocks | None:
    """Code x scale in blocks; None: the kernels do not make these numbers.

    Args:
        codes: [outputs, inputs], floats of a byte.
        scales: [outputs, groups], float32.
        size: inputs in a group; the last one may be cut.
    """
    outputs, inputs = codes.shape
    # The kernels multiply scales by 2^120.
    if codes.dtype != torch.float8_e4m3fn or not takes_groups(size, inputs) or not bool((scales.abs() < 256).all()):
        return None
    if bool(torch.isnan(codes).any()):
        return None
    blocks = -(-inputs // BLOCK)
    numbers = torch.nn.functional.pad(codes.view(torch.uint8), (0, blocks * BLOCK - inputs)).view(outputs, blocks, BLOCK)
    each = scales[:, torch.arange(blocks) * BLOCK // size].contiguous()[..., None].view(torch.uint8)
    return StoredBlocks(torch.cat([each, numbers], -1).flatten(1), FLOATS, inputs)


def takes_groups(size: int, inputs: int) -> bool:
    """Whether a block lies in one group of ``size`` inputs."""
    return size % BLOCK == 0 or size >= inputs


def likely_kind(bits: int, symmetric: bool, size: int, scales: str) -> str:
    """The type that ``as_blocks`` finds where nothing speaks against it; F32: none.

    Args:
        scales: safetensors' name of the scales' type. Of bfloat16, the smallest do not fit, which shows when they are read.
    """
    if scales not in ("F16", "BF16"):
        return "F32"
    if size % BLOCK:
        return IN_HALVES if size % HALF == 0 and bits <= 4 else "F32"
    return f"Q{4 if bits <= 4 else 8}_{'0' if symmetric else 'Z'}"
