"""Weights of small whole numbers, each less a zero point and times a scale, which groups of inputs share."""

from __future__ import annotations

import torch


def scaled_integers(
    codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, groups: torch.Tensor | int
) -> torch.Tensor:
    """(code - zero point) x scale, [outputs, inputs] in float32.

    The difference is exact, and so is its product with a scale of 16 bits.

    Args:
        codes: [outputs, inputs], whole numbers.
        zeros: [outputs, groups], whole numbers; or one for all.
        scales: [outputs, groups].
        groups: the group of each input, [inputs]; or the number of inputs in a group.
    """
    made = codes.float() - (zeros if isinstance(zeros, int) else _of_inputs(zeros.float(), groups))
    return made.mul_(_of_inputs(scales.float(), groups))


def _of_inputs(values: torch.Tensor, groups: torch.Tensor | int) -> torch.Tensor:
    """[outputs, groups] to [outputs, inputs]."""
    if isinstance(groups, int):
        return values.repeat_interleave(groups, 1)
    return values[:, groups]


def check_groups(groups: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """The group of each input, as int64.

    Raises:
        ValueError: there is no such group.
    """
    wide = groups.long()
    if len(wide) and not 0 <= int(wide.min()) <= int(wide.max()) < count:
        raise ValueError(f"{name} names groups from {int(wide.min())} to {int(wide.max())}: must be from 0 to {count - 1}")
    return wide
