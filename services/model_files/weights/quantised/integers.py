"""Weights of small whole numbers, each less a zero point and times a scale, which groups of inputs share."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.model_files.weights.quantised.as_blocks import as_blocks
from services.model_files.weights.stored_blocks import StoredBlocks, Weight


def scaled_integers(
    codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, groups: torch.Tensor | int
) -> Weight:
    """(code - zero point) x scale, [outputs, inputs]: in blocks that hold these numbers, else in float32.

    The difference is exact, and so is its product with a scale of 16 bits.

    Args:
        codes: [outputs, inputs], whole numbers.
        zeros: [outputs, groups], whole numbers; or one for all.
        scales: [outputs, groups].
        groups: the group of each input, [inputs]; or the number of inputs in a group.
    """
    if (blocks := _in_blocks(codes, zeros, scales, groups)) is not None:
        return blocks
    made = codes.float() - (zeros if isinstance(zeros, int) else _of_inputs(zeros.float(), groups))
    return made.mul_(_of_inputs(scales.float(), groups))


def _in_blocks(
    codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, groups: torch.Tensor | int
) -> StoredBlocks | None:
    """The same in blocks, for which inputs of a group are laid together; None: no type holds these numbers."""
    if isinstance(groups, int):
        return as_blocks(codes, zeros, scales, groups)
    counts = groups.bincount(minlength=scales.shape[1])
    if bool((counts != counts[0]).any()):
        return None
    # Of equal groups, inputs keep their order.
    order = groups.argsort(stable=True)
    made = as_blocks(codes[:, order], zeros, scales, int(counts[0]))
    return None if made is None else replace(made, order=order)


def _of_inputs(values: torch.Tensor, groups: torch.Tensor | int) -> torch.Tensor:
    """[outputs, groups] to [outputs, inputs], or one for all inputs."""
    if values.shape[1] == 1:
        return values
    if isinstance(groups, int):
        return values.repeat_interleave(groups, 1)
    return values[:, groups]


def groups_in_order(groups: torch.Tensor, count: int, size: int, name: str) -> torch.Tensor | int:
    """The group of each input, as int64; or ``size``, if the groups follow one another.

    Raises:
        ValueError: there is no such group.
    """
    wide = groups.long()
    if len(wide) and not 0 <= int(wide.min()) <= int(wide.max()) < count:
        raise ValueError(f"{name} names groups from {int(wide.min())} to {int(wide.max())}: must be from 0 to {count - 1}")
    return size if torch.equal(wide, torch.arange(len(wide)) // size) else wide
