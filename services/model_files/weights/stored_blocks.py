"""Weights as stored in a GGUF file: blocks of numbers with a few bits each, and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# Types whose blocks the kernels can read. All have BLOCK inputs per block.
KEPT = ("Q4_0", "Q4_1", "Q8_0")
BLOCK = 32


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in blocks of ``BLOCK`` inputs.

    Attributes:
        raw: [outputs, bytes per row], uint8; rows are padded to whole blocks.
        kind: GGUF's name of the type, one of ``KEPT``.
    """

    raw: torch.Tensor
    kind: str
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        return self.raw.shape[0], self.in_features

    def float(self) -> torch.Tensor:
        """[outputs, inputs] in float32, equal to what transformers reads from the file."""
        whole = torch.from_numpy(quants.dequantize(self.raw.numpy(), GGMLQuantizationType[self.kind]))
        return whole[:, : self.in_features]

    def finite(self) -> bool:
        """Whether all numbers are finite, which depends on the one or two float16 scales at the start of each block."""
        blocks = self.raw.view(self.raw.shape[0], self.in_features // BLOCK, -1)
        scales = blocks[..., : 4 if self.kind == "Q4_1" else 2].contiguous().view(torch.float16)
        return bool(torch.isfinite(scales).all())


def bytes_of_row(kind: str, in_features: int) -> int:
    """Bytes of a row in blocks."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return in_features // BLOCK * int(size)


# The weight of a linear layer, [outputs, inputs].
Weight = torch.Tensor | StoredBlocks


def quantized(weight: torch.Tensor) -> StoredBlocks:
    """``weight`` as Q8_0 blocks, eight bits per number; its inputs are padded with zeros to whole blocks."""
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK))
    raw = quants.quantize(padded.numpy(), GGMLQuantizationType.Q8_0)
    return StoredBlocks(torch.from_numpy(raw), "Q8_0", weight.shape[1])


def stored_as(weight: Weight) -> str:
    """GGUF's or torch's name of the weight's type."""
    return weight.kind if isinstance(weight, StoredBlocks) else str(weight.dtype).removeprefix("torch.")


def alike(weights: Sequence[Weight]) -> bool:
    """Whether the weights can be joined: same type and same number of inputs."""
    return len({(stored_as(weight), weight.shape[1]) for weight in weights}) == 1


def joined(weights: Sequence[Weight]) -> Weight:
    """The weights one after the other along the outputs; they must be ``alike``."""
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, StoredBlocks)]
    if blocks:
        return StoredBlocks(torch.cat([weight.raw for weight in blocks]), blocks[0].kind, blocks[0].in_features)
    return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])


class StoredLinear(torch.nn.Module):
    """A linear layer with weights in blocks, until it is packed."""

    def __init__(self, weight: StoredBlocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        # A parameter, which is loaded from the files after this layer was made.
        self.bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]; slow, since it unpacks the blocks."""
        return torch.nn.functional.linear(rows, self.weight.float(), self.bias)
