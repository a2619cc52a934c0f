"""The matrices of a layer's experts as one weight, which a model holds as a parameter of three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.model_files.weights.stored_blocks import StoredBlocks, Weight, alike, joined, numbers_of, stored_as


@dataclass(frozen=True, slots=True)
class StackedBlocks:
    """Matrices of one shape, some or all of them in blocks.

    Attributes:
        matrices: of each expert, [outputs, inputs]; what blocks do not hold exactly is in numbers.
        inputs_first: whether the parameter is [experts, inputs, outputs].
    """

    matrices: tuple[Weight, ...]
    inputs_first: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the parameter."""
        outputs, inputs = self.matrices[0].shape
        return (len(self.matrices), inputs, outputs) if self.inputs_first else (len(self.matrices), outputs, inputs)

    @property
    def form(self) -> tuple[int, int, bool]:
        """Outputs and inputs of a matrix, and ``inputs_first``."""
        outputs, inputs = self.matrices[0].shape
        return outputs, inputs, self.inputs_first

    @property
    def outputs_axis(self) -> int:
        """The dimension of the parameter along which a part of it is in blocks, too."""
        return 2 if self.inputs_first else 1

    def float(self) -> torch.Tensor:
        """The parameter in float32."""
        return self.numbers().float()

    def numbers(self) -> torch.Tensor:
        """The parameter in the shortest type that holds all of its numbers: see ``numbers_of``."""
        short = all(stored_as(one) in ("MXFP4", "bfloat16") for one in self.matrices)
        made = torch.empty(self.shape, dtype=torch.bfloat16 if short else torch.float32)
        # One after the other, since a layer's experts are most of its weights.
        for place, matrix in zip(made, self.matrices, strict=True):
            numbers = numbers_of(matrix)
            place.copy_(numbers.T if self.inputs_first else numbers)
        return made

    def experts(self, begin: int, end: int) -> StackedBlocks:
        """Those from ``begin`` to before ``end``."""
        return replace(self, matrices=self.matrices[begin:end])

    def outputs(self, ranges: Sequence[range]) -> StackedBlocks:
        """The outputs in these ranges of each matrix, one after the other."""
        return replace(self, matrices=tuple(_outputs(one, ranges) for one in self.matrices))

    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return all(
            one.finite() if isinstance(one, StoredBlocks) else bool(torch.isfinite(one).all()) for one in self.matrices
        )

    def contents(self) -> list[torch.Tensor]:
        """What is stored of each matrix."""
        return [one.raw if isinstance(one, StoredBlocks) else one for one in self.matrices]


# What a model has of a layer: a tensor, a matrix in blocks, or those of experts.
AnyWeight = Weight | StackedBlocks


def in_a_stack(matrices: Sequence[Weight], *, inputs_first: bool = False) -> StackedBlocks | torch.Tensor:
    """Experts' matrices as the parameter that they are in the model: in numbers, if none of them is in blocks."""
    made = StackedBlocks(tuple(matrices), inputs_first)
    return made if any(isinstance(one, StoredBlocks) for one in matrices) else made.numbers()


def one_below_the_other(matrices: Sequence[Weight]) -> Weight:
    """One matrix with all outputs: in blocks, if all are in blocks of one type and in one order."""
    if isinstance(matrices[0], StoredBlocks) and alike(matrices):
        return joined(matrices)
    return torch.cat([numbers_of(one) for one in matrices])


def any_numbers(weight: AnyWeight) -> torch.Tensor:
    """The weight as stored, blocks as the numbers that they stand for."""
    return weight.numbers() if isinstance(weight, StackedBlocks) else numbers_of(weight)


def _outputs(matrix: Weight, ranges: Sequence[range]) -> Weight:
    if isinstance(matrix, StoredBlocks):
        return joined([matrix.rows(one.start, one.stop) for one in ranges])
    return torch.cat([matrix[one.start : one.stop] for one in ranges])
