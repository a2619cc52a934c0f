"""An adapter's low-rank products in a whole decoder layer, as the kernel reads them; see layer.c."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from services.verifier.kernels.native.low_rank_kernel import LowRank, LowRanksStruct, PackedLowRank

# The linear parts of a layer, by the input that they share: the order of layer.c.
_PLACES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PARTS = tuple(name for names in _PLACES for name in names)


class _Adapter(ctypes.Structure):
    _fields_ = [("place", LowRanksStruct * len(_PLACES))]


class LayerAdapter:
    """An adapter of one layer.

    Args:
        products: by the names of the layer's linear parts.
        at: where the outputs of all its parts begin, by the same names.

    Attributes:
        width: most inner numbers that a row needs.

    Raises:
        ValueError: the layer has no such part.
    """

    def __init__(self, products: Mapping[str, LowRank], at: Mapping[str, int]) -> None:
        if unknown := sorted(products.keys() - at.keys()):
            raise ValueError(f"it has no linear part {unknown[0]}")
        self.struct = _Adapter()
        self.width = 0
        # Owners of the memory that the struct points to.
        self._packed: list[PackedLowRank] = []
        for place, names in zip(self.struct.place, _PLACES, strict=True):
            begin = 0
            for name in (name for name in names if name in products):
                packed = PackedLowRank(products[name], at[name], begin)
                self._packed.append(packed)
                place.part[place.count] = packed.struct
                place.count += 1
                begin += packed.inner
            self.width = max(self.width, begin)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdaptedRows:
    """Neighbouring rows of a pass that have one adapter.

    Attributes:
        of_layers: the adapter's part of each whole layer that has one.
    """

    first: int
    rows: int
    of_layers: Mapping[nn.Module, LayerAdapter]
