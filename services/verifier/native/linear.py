"""Linear layers on a CPU by a kernel of our own; see linear.c."""

from __future__ import annotations

import ctypes

import torch
from torch import nn
from torch.nn import functional

# As in the source.
_PANEL = 32

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class NativeLinear(nn.Module):
    """Drop-in for ``nn.Linear`` in inference: float32, CPU. A row's result does not depend on the other rows."""

    def __init__(self, kernels: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernel = kernels.outrider_linear
        self._kernel.argtypes = [_POINTER] * 4 + [_INTEGER] * 3
        self._kernel.restype = None
        missing = -self.out_features % _PANEL
        self._panels = (self.out_features + missing) // _PANEL
        padded = functional.pad(weight.detach(), (0, 0, 0, missing))
        self._weight = padded.view(self._panels, _PANEL, self.in_features).transpose(1, 2).contiguous()
        self._bias = torch.zeros(self._panels * _PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self._panels * _PANEL)
        self._kernel(
            rows.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), out.data_ptr(),
            rows.numel() // self.in_features, self.in_features, self._panels,
        )  # fmt: skip
        return out[..., : self.out_features]
