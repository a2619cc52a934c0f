"""RWKV's time mixing (Peng et al., 2305.13048, equations 16 to 22): a mean of values, weighted by keys and age."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.verifier.kernels.native.vector_kernel import averaged, fits
from services.verifier.kernels.whole_vectors import filled
from services.verifier.recurrence.levels import stepped
from services.verifier.recurrence.order import Order

# The largest exponent of a state that has seen no row.
_LEAST = -1e38


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedMean:
    """Implements ``Recurrence``: a row is given its keys and values, [channels] each.

    The state holds the weighted sum of values, the sum of weights, and the largest exponent so far, which scales both.

    Attributes:
        decay: [channels], below 0, added to the exponents of earlier rows.
        first: [channels], added to the exponent of a row's own key.
    """

    decay: torch.Tensor
    first: torch.Tensor

    @property
    def state_shape(self) -> tuple[int, ...]:
        return 3, self.width

    @property
    def width(self) -> int:
        return self.decay.shape[0]

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        keys, values = torch.split(given.contiguous(), self.width, dim=1)
        decay, first = self.decay.float(), self.first.float()
        if order.steps is not None:
            return order.steps.averaged(order.walk, states, keys, values, decay, first)
        if order.library is not None and fits(states):
            # The same sums; e^x is rounded otherwise in its last place than by torch.
            return averaged(order.library, order, states, keys, values, decay, first)

        def step(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight, largest = state.unbind(1)
            # A state without a row holds zeros; afterwards its weight is never below 1.
            largest = torch.where(weight == 0, _LEAST, largest)
            key, value = keys[rows], values[rows]
            read, read_weight, _ = _added(total, weight, largest, key + first, value)
            state = torch.stack(_added(total, weight, largest + decay, key, value), dim=1)
            return state, read / read_weight

        return stepped(order, states, self.width, step)


def _added(
    total: torch.Tensor, weight: torch.Tensor, largest: torch.Tensor, exponent: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state with a value of this exponent."""
    most = torch.maximum(largest, exponent)
    before, own = filled("exp", largest - most), filled("exp", exponent - most)
    return before * total + own * value, before * weight + own, most
