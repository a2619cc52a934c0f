"""What is sought of a pass's rows where ranks share the vocabulary, so that they need not be whole."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.verifier.kernels.native.likeliest_kernel import MOST
from services.verifier.model.target_port import Rows
from speculation.types import SamplingParams

# A draw as three integers of 64 bits, which is how orders carry it.
_OF_DRAW, _AS_INTEGERS = "=dQq", "=3q"


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """How a request draws whose logits nothing changes.

    Attributes:
        top_k: how many may be drawn, and what truncates further sees no others; 0: all may.
    """

    temperature: float
    seed: int
    top_k: int

    @classmethod
    def by(cls, params: SamplingParams) -> Draw | None:
        """None: the request does not draw, or what may be drawn depends on whole rows, as top-p without top-k does."""
        of_all = not params.top_k and params.top_p >= 1 and not params.min_p
        # One more tells whether equals of the last one are left out.
        if params.temperature == 0 or not (of_all or 0 < params.top_k < MOST):
            return None
        return cls(temperature=params.temperature, seed=params.seed, top_k=params.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sought:
    """What every rank finds in its part.

    Attributes:
        ids: how many of the likeliest ids of each row; 0: whole rows are needed.
        draws: of each entry of the pass, how it draws; None: it takes the likeliest. Empty: none of them draws.
    """

    ids: int = 0
    draws: tuple[Draw | None, ...] = ()

    def numbers(self) -> list[int]:
        """As integers of 64 bits."""
        numbers = [self.ids]
        for draw in self.draws:
            told = (0.0, 0, 0) if draw is None else (draw.temperature, draw.seed, draw.top_k)
            numbers += struct.unpack(_AS_INTEGERS, struct.pack(_OF_DRAW, *told))
        return numbers

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Sought:
        """The inverse of ``numbers``."""
        draws = []
        for at in range(1, len(numbers), 3):
            temperature, seed, top_k = struct.unpack(_OF_DRAW, struct.pack(_AS_INTEGERS, *numbers[at : at + 3]))
            draws.append(Draw(temperature=temperature, seed=seed, top_k=top_k) if temperature else None)
        return cls(ids=numbers[0], draws=tuple(draws))

    def of_rows(self, batch: Sequence[Rows]) -> Iterator[tuple[int, int, Draw]]:
        """Each row that a token is drawn after: its index among the rows read, the token's position, and how."""
        end = 0
        for rows, draw in zip(batch, self.draws, strict=False):
            if draw is not None and rows.logits:
                depths = [0]
                for parent in rows.parents:
                    depths.append(depths[parent + 1] + 1)
                for row, depth in enumerate(depths, end):
                    yield row, rows.context + rows.chain + depth, draw
            end += rows.read


WHOLE_ROWS = Sought()
