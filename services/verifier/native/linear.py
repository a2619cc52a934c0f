"""Linear layers on a CPU by a kernel of our own; see linear.c."""

from __future__ import annotations

import ctypes

import torch
from torch import nn
from torch.nn import functional

# As in the source.
_PANEL = 32


class _Linear(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("rows", "weights", "scale", "bias", "out")],
        *[(name, ctypes.c_int64) for name in ("row_count", "inputs", "panels")],
    ]


class NativeLinear(nn.Module):
    """Drop-in for ``nn.Linear`` in inference: float32, CPU. A row's result does not depend on the other rows.

    Args:
        dtype: of the weights: float32, or int8 with a scale for every output (symmetric; the largest weight is 127).
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernel = kernels.outrider_linear
        self._kernel.argtypes = [ctypes.POINTER(_Linear), ctypes.c_int64]
        self._kernel.restype = None
        missing = -self.out_features % _PANEL
        panels = (self.out_features + missing) // _PANEL
        padded = functional.pad(weight.detach().float(), (0, 0, 0, missing))
        self._scale = torch.ones(len(padded))
        if dtype == torch.int8:
            self._scale = padded.abs().amax(1).clamp(min=1e-12) / 127
            padded = (padded / self._scale[:, None]).round()
        self._weight = padded.to(dtype).view(panels, _PANEL, self.in_features).transpose(1, 2).contiguous()
        self._bias = torch.zeros(len(padded))
        if bias is not None:
            self._bias[: self.out_features] = bias.detach().float()
        pointers = (self._weight.data_ptr(), self._scale.data_ptr(), self._bias.data_ptr())
        self._layer = _Linear(None, *pointers, None, 0, self.in_features, panels)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features].

        Raises:
            ValueError: other rows; the kernel sees memory, not shapes.
        """
        if rows.shape[-1] != self.in_features or rows.dtype != torch.float32:
            raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}: must be [..., {self.in_features}] float32")
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], len(self._bias))
        layer = self._layer
        layer.rows, layer.out, layer.row_count = rows.data_ptr(), out.data_ptr(), rows.numel() // self.in_features
        self._kernel(layer, self._weight.element_size())
        return out[..., : self.out_features]
