"""Weights as a GGUF file stores them: blocks of a few bits for each number, with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# Types whose blocks the kernels read as they are. All of BLOCK inputs.
KEPT = ("Q4_0", "Q4_1", "Q8_0")
BLOCK = 32


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in blocks of ``BLOCK`` inputs.

    Attributes:
        raw: [outputs, bytes of a row], uint8; a row is filled up to whole blocks.
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
        """[outputs, inputs] in float32: what transformers makes of the file."""
        whole = torch.from_numpy(quants.dequantize(self.raw.numpy(), GGMLQuantizationType[self.kind]))
        return whole[:, : self.in_features]

    def finite(self) -> bool:
        """Whether all of its numbers are: the scales that each block begins with, one or two in float16."""
        blocks = self.raw.view(self.raw.shape[0], self.in_features // BLOCK, -1)
        scales = blocks[..., : 4 if self.kind == "Q4_1" else 2].contiguous().view(torch.float16)
        return bool(torch.isfinite(scales).all())


def bytes_of_row(kind: str, in_features: int) -> int:
    """Of a row of blocks."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return in_features // BLOCK * int(size)


# Weights of a linear layer: [outputs, inputs].
Weight = torch.Tensor | StoredBlocks


def quantized(weight: torch.Tensor) -> StoredBlocks:
    """``weight`` in eight bits a number, zeros behind its inputs if they fill no block."""
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK))
    raw = quants.quantize(padded.numpy(), GGMLQuantizationType.Q8_0)
    return StoredBlocks(torch.from_numpy(raw), "Q8_0", weight.shape[1])


def stored_as(weight: Weight) -> str:
    """The type of its numbers: GGUF's name, or torch's."""
    return weight.kind if isinstance(weight, StoredBlocks) else str(weight.dtype).removeprefix("torch.")


def alike(weights: Sequence[Weight]) -> bool:
    """Whether they can be joined: stored alike, with as many inputs."""
    return len({(stored_as(weight), weight.shape[1]) for weight in weights}) == 1


def joined(weights: Sequence[Weight]) -> Weight:
    """The outputs of all of them, one after the other; they must be alike."""
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, StoredBlocks)]
    if blocks:
        return StoredBlocks(torch.cat([weight.raw for weight in blocks]), blocks[0].kind, blocks[0].in_features)
    return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])


class StoredLinear(torch.nn.Module):
    """A linear layer that waits to be packed: its place in the model, and its weights in blocks."""

    def __init__(self, weight: StoredBlocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        # A parameter like any other: it is read from the files after this place was made.
        self.bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], slowly."""
        return torch.nn.functional.linear(rows, self.weight.float(), self.bias)
