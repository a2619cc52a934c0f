"""The gated delta rule: with one decay for each head (Yang, Kautz and Hatamizadeh, 2412.06464, equation 10), or one for each
number of its keys (Kimi Team, 2510.26692, equation 1).

A row lets its state decay, and then corrects what it holds for the row's key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.verifier.kernels.whole_vectors import filled
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.keyed_states import read
from services.verifier.recurrence.order import Order

# Added to the sum of squares of a key, as in transformers.
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaRule:
    """Implements ``Recurrence``: a head's state is [key size, value size].

    A row is given its queries and keys, [key heads, key size] each, its values, [heads, value size], the logarithms of its
    decays, [heads, decays], and how much of a correction is written, [heads].

    Attributes:
        key_heads: each serves as many consecutive heads.
        decays: of a head: 1, or as many as its keys have numbers.
        normalised: whether queries and keys are divided by their lengths.
    """

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    decays: int
    normalised: bool

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.key_size, self.value_size

    @property
    def width(self) -> int:
        return self.heads * self.value_size

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        of_keys = self.key_heads * self.key_size
        sizes = [of_keys, of_keys, self.width, self.heads * self.decays, self.heads]
        queries, keys, values, decays, parts = torch.split(given, sizes, dim=1)
        rows = KeyedRows(
            keys=self._by_head(order, keys),
            queries=self._by_head(order, queries) * self.key_size**-0.5,
            values=values.reshape(-1, self.heads, self.value_size),
            factors=filled("exp", decays).view(-1, self.heads, self.decays),
            parts=parts,
        )
        return read(order, states, rows)

    def _by_head(self, order: Order, vectors: torch.Tensor) -> torch.Tensor:
        """[rows, key heads, key size]."""
        vectors = vectors.reshape(-1, self.key_heads, self.key_size)
        if not self.normalised:
            return vectors
        if order.steps is not None:
            # There the order of a sum by torch would depend on how many rows there are.
            return order.steps.units(vectors, _EPSILON)
        return vectors * ((vectors * vectors).sum(2, keepdim=True) + _EPSILON).rsqrt()
