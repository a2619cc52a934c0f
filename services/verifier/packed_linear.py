"""Linear layers whose weights are packed once, in oneDNN's own layout.

Two gains on a CPU. Speed: torch's default repacks the weights at every call, which makes 2 to 16 rows cost twice what one
row costs. Exactness: with two rows or more, a row's result does not depend, bit for bit, on how many other rows share the
pass, so a token checked in a tree sees the very numbers that it would have seen alone (docs/log.md, 2026-11-21).
"""

from __future__ import annotations

import torch
from torch import nn

# Row count that the packed layout is laid out for; any number of rows works.
_TYPICAL_ROWS = 16


class PackedLinear(nn.Module):
    """Drop-in for ``nn.Linear`` in inference: float32, CPU. Needs two rows or more for row-exact results."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


def packing_works() -> bool:
    """Whether this build of torch can pack weights."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(model: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``model``; returns how many."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
