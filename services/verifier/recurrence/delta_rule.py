"""The gated delta rule: with one decay for each head (Yang, Kautz and Hatamizadeh, 2412.06464, equation 10), or one for each
number of its keys (Kimi Team, 2510.26692, equation 1).

A state is a memory of values by their keys. A row lets it decay, and then corrects what it holds for the row's key. Products
and sums are of whole rows, and sums over a key's numbers are folded in halves, so that no number depends on which other rows
step at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.verifier.kernels.whole_vectors import filled
from services.verifier.recurrence.folded import folded
from services.verifier.recurrence.levels import stepped
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
        queries, keys = (self._of_heads(each) for each in (queries, keys))
        queries = queries * self.key_size**-0.5
        values = values.reshape(-1, self.heads, self.value_size)
        factors = filled("exp", decays).view(-1, self.heads, self.decays, 1)
        parts = parts[..., None]

        def step(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = corrected(state, factors[rows], keys[rows][..., None], values[rows], parts[rows])
            return state, folded(state * queries[rows][..., None], 2).flatten(1)

        return stepped(order, states, self.width, step)

    def _of_heads(self, vectors: torch.Tensor) -> torch.Tensor:
        """[rows, heads, key size], from those of key heads."""
        vectors = vectors.reshape(-1, self.key_heads, self.key_size)
        if self.normalised:
            vectors = vectors * (folded(vectors * vectors, 2) + _EPSILON).rsqrt()[..., None]
        return vectors.repeat_interleave(self.heads // self.key_heads, dim=1)


def corrected(
    state: torch.Tensor, factors: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, parts: torch.Tensor
) -> torch.Tensor:
    """The states after rows with these keys and values.

    Args:
        state: [rows, heads, key size, value size].
        factors: [rows, heads, 1 or key size, 1], by which a state decays first.
        keys: [rows, heads, key size, 1].
        values: [rows, heads, value size].
        parts: [rows, heads, 1], how much of the correction is written.
    """
    state = state * factors
    return state + keys * ((values - folded(state * keys, 2)) * parts)[:, :, None]
