"""Norms with a gate whose rows do not depend on what shares their pass; see ``device.gated_norm``.

A module is replaced for what it computes, not for its name: each is tried on random rows.
"""

from __future__ import annotations

import inspect
import itertools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.gated_norm import normalise_gated
from services.verifier.kernels.triton.row_products import NORM_LANES

_TRIED_ROWS = 4
# Of a value: how far one more rounding may move it, in units of its type's last place.
_ROUNDINGS = 4


class _Form(NamedTuple):
    """What such a norm computes.

    Attributes:
        width: of a group, which is normalised by itself.
        first: whether rows are gated before they are normalised.
        rounded: whether rows are rounded before they are multiplied by the weight, and before a gate that comes after.
        sigmoid: whether a gate is a sigmoid; else it is SiLU.
    """

    width: int
    first: bool
    rounded: bool
    sigmoid: bool


class RowGatedNorm(nn.Module):
    """Replaces an RMS norm with a gate.

    Args:
        weight: [width], of the rows' own type.
    """

    def __init__(self, weight: torch.Tensor, eps: float, form: _Form) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._eps, self._form = eps, form

    @override
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]; ``gate`` has the same shape."""
        rows, width = hidden_states.contiguous(), self._form.width
        made = torch.empty_like(rows)
        normalise_gated[(rows.numel() // width,)](
            rows, gate.contiguous(), self.weight, made, self._eps, WIDTH=width, GROUPS=len(self.weight) // width,
            BLOCK=NORM_LANES, FIRST=self._form.first, ROUNDED=self._form.rounded, SIGMOID=self._form.sigmoid, **COMPILED,
        )  # fmt: skip
        return made


def gated_norm_of(module: nn.Module) -> RowGatedNorm | None:
    """What replaces a norm with a gate; None if ``module`` computes something else."""
    weight, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    plain = len(module._parameters) == 1 and not module._buffers and not list(module.children())
    if not plain or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if "gate" not in inspect.signature(module.forward).parameters:
        return None
    generator = torch.Generator().manual_seed(0)
    rows, gate = (
        torch.randn(1, _TRIED_ROWS, len(weight), generator=generator, dtype=torch.float32).to(weight) for _ in range(2)
    )
    try:
        expected = module(rows, gate=gate)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != rows.shape or expected.dtype != rows.dtype:
        return None
    either = (True, False)
    forms = [_Form(*form) for form in itertools.product(_widths(module, len(weight)), either, either, either)]
    distances = [float((_computed(rows, gate, weight, eps, form) - expected).float().abs().max()) for form in forms]
    best = min(range(len(forms)), key=distances.__getitem__)
    if not distances[best] <= _ROUNDINGS * torch.finfo(rows.dtype).eps * float(expected.abs().max()):
        return None
    return RowGatedNorm(weight, eps, forms[best])


def _widths(module: nn.Module, width: int) -> list[int]:
    """Of a group, as modules that have groups say it in two ways."""
    said = [getattr(module, "group_size", None)]
    groups = getattr(module, "n_groups", None)
    said += [width // groups] if isinstance(groups, int) and groups > 0 else []
    return sorted({width, *(one for one in said if isinstance(one, int) and 0 < one < width and width % one == 0)})


def _computed(rows: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, form: _Form) -> torch.Tensor:
    numbers = rows.float()
    opened = gate.float().sigmoid() if form.sigmoid else functional.silu(gate.float())
    if form.first:
        numbers = numbers * opened
    groups = numbers.view(-1, form.width)
    made = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).view(numbers.shape)
    made = weight * (made.to(rows.dtype) if form.rounded else made)
    return (made if form.first else made * opened).to(rows.dtype)
