"""Linear layers on a CPU with a native kernel; see linear.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from services.model_files.weights.stored_blocks import BLOCK, StoredBlocks, Weight, bytes_of_row, sizes_of
from services.verifier.kernels.exact_weights import PackedLinear, SortedProduct
from services.verifier.kernels.native.library import Library

# Must equal the constants in vectors.h and blocks.h.
PANEL = 32
_TYPES = (
    "float32", "bfloat16", "Q8_0", "Q4_0", "Q4_1", "Q8_Z", "Q4_Z", "Q5_0", "Q5_1", "E4M3", "IQ4_NL", "MXFP4",
    "NF4", "FP4", "E2M1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q4_H",
)  # fmt: skip
# Bytes that a block has in a panel beyond those in a file: scales and minima of six bits are bytes there.
_ADDED = {"Q3_K": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}


class LinearStruct(ctypes.Structure):
    """The struct in linear.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weights", "bias")],
        *[(name, ctypes.c_int64) for name in ("type", "inputs", "panels")],
        ("order", ctypes.c_void_p),
    ]


class NativeLinear(PackedLinear):
    """Replaces ``nn.Linear`` for inference on a CPU, with sums in float32. A row's result does not depend on the other rows.

    Args:
        weight: float32, bfloat16 or blocks; kept in its type.
    """

    def __init__(self, kernels: Library, weight: Weight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.kernels = kernels
        self.out_features, self.in_features = weight.shape
        self._kernel = kernels.functions.outrider_linear
        self._kernel.argtypes = [ctypes.POINTER(LinearStruct), ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_int64]
        self._kernel.restype = None
        self.stored_as = weight.kind if isinstance(weight, StoredBlocks) else str(weight.dtype).removeprefix("torch.")
        self._panels = -(-self.out_features // PANEL)
        # Inputs are padded with zeros to whole blocks, which changes no sum.
        inputs_of_block = sizes_of(weight.kind)[0] if isinstance(weight, StoredBlocks) else BLOCK
        self._missing_inputs = 0 if self.stored_as == "float32" else -self.in_features % inputs_of_block
        self._bias = None
        if bias is not None:
            self._bias = functional.pad(bias.detach().float(), (0, self._panels * PANEL - self.out_features))
        self.struct = LinearStruct(
            None,
            None if self._bias is None else self._bias.data_ptr(),
            _TYPES.index(self.stored_as),
            self.in_features + self._missing_inputs,
            self._panels,
        )
        # Blocks in another order than the inputs' are whole: nothing is padded.
        self.order = weight.order if isinstance(weight, StoredBlocks) else None
        self.struct.order = None if self.order is None else self.order.data_ptr()
        self._weight = self._in_panels(kernels, weight)
        self.struct.weights = self._weight.data_ptr()

    def _in_panels(self, kernels: Library, weight: Weight) -> torch.Tensor:
        if self.stored_as == "float32":
            assert isinstance(weight, torch.Tensor)
            padded = functional.pad(weight.detach(), (0, 0, 0, self._panels * PANEL - self.out_features))
            return padded.view(self._panels, PANEL, self.in_features).transpose(1, 2).contiguous()
        if isinstance(weight, StoredBlocks):
            rows = weight.raw.contiguous()
        else:
            rows = functional.pad(weight.detach(), (0, self._missing_inputs)).contiguous().view(torch.uint8)
        inputs = self.in_features + self._missing_inputs
        size = bytes_of_row(self.stored_as, inputs) if isinstance(weight, StoredBlocks) else 2 * inputs
        if tuple(rows.shape) != (self.out_features, size):
            raise ValueError(f"blocks are {tuple(rows.shape)}: must be {(self.out_features, size)} for {self.stored_as}")
        laid_out = size
        if isinstance(weight, StoredBlocks):
            laid_out += _ADDED.get(weight.kind, 0) * (inputs // sizes_of(weight.kind)[0])
        packed = torch.empty(self._panels * PANEL * laid_out, dtype=torch.uint8)
        pack = kernels.functions.outrider_pack
        pack.argtypes = [ctypes.POINTER(LinearStruct), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        pack.restype = None
        pack(self.struct, rows.data_ptr(), size, self.out_features, packed.data_ptr())
        return packed

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features].

        Raises:
            ValueError: rows of another shape or type, which the kernel itself could not notice.
        """
        if rows.shape[-1] != self.in_features or rows.dtype != torch.float32:
            raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}: must be [..., {self.in_features}] float32")
        if self.order is not None:
            rows = rows.index_select(-1, self.order)
        rows = functional.pad(rows, (0, self._missing_inputs)) if self._missing_inputs else rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self._panels * PANEL)
        self._kernel(self.struct, rows.numel() // rows.shape[-1], rows.data_ptr(), None, out.data_ptr(), out.shape[-1])
        return out[..., : self.out_features]

    @classmethod
    @override
    def together(cls, layers: Sequence[PackedLinear]) -> SortedProduct | None:
        own = [layer for layer in layers if isinstance(layer, cls)]
        # Blocks of different types may be padded to different numbers of inputs.
        shapes = {(layer.out_features, layer.in_features, layer.struct.inputs) for layer in own}
        return _Linears(own) if len(own) == len(layers) and len(shapes) == 1 else None


class _Linears:
    """Implements ``SortedProduct`` by one call of a native kernel."""

    def __init__(self, layers: Sequence[NativeLinear]) -> None:
        # Held, since the structs say where their weights lie.
        self._layers = layers
        self._structs = (LinearStruct * len(layers))(*(layer.struct for layer in layers))
        self._in_order = self._ordering(layers)
        self._kernel = layers[0].kernels.functions.outrider_linears
        self._kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int64]
        self._kernel.restype = None

    def _ordering(self, layers: Sequence[NativeLinear]) -> Any:
        """What brings rows in the order of their layer's weights; None: all of them lie in that of the inputs."""
        if all(layer.order is None for layer in layers):
            return None
        # Held, as the layers are: one for those that have none of their own.
        self._own_order = torch.arange(layers[0].in_features)
        for struct in self._structs:
            struct.order = struct.order or self._own_order.data_ptr()
        kernel = layers[0].kernels.functions.outrider_in_order
        kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 4]
        kernel.restype = None
        return kernel

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        layer = self._layers[0]
        missing = layer.struct.inputs - layer.in_features
        rows = functional.pad(rows, (0, missing)) if missing else rows.contiguous()
        if self._in_order is not None:
            given, rows = rows, torch.empty_like(rows)
            asked = chosen.data_ptr(), ends.data_ptr(), given.data_ptr(), rows.data_ptr()
            self._in_order(self._structs, len(chosen), *asked)
        out = rows.new_empty(len(rows), layer.struct.panels * PANEL)
        self._kernel(
            self._structs, len(chosen), chosen.data_ptr(), ends.data_ptr(), rows.data_ptr(), out.data_ptr(), out.shape[1]
        )
        return out[:, : layer.out_features].contiguous()
