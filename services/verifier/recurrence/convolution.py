"""Short causal convolutions, one filter per channel (depthwise)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN

from services.verifier.kernels.native.vector_kernel import convolved, fits_convolution
from services.verifier.recurrence.order import Order


@dataclass(frozen=True, kw_only=True, eq=False)
class ShortConvolution:
    """Implements ``Recurrence``: a row's output is a weighted sum of its input and the inputs before it.

    The state holds these inputs, [taps - 1, channels], the oldest first.

    Attributes:
        weight: [channels, taps]; the last tap is the row's own.
        bias: [channels].
        activation: transformers' name of the function applied to the sum.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None

    @property
    def state_shape(self) -> tuple[int, ...]:
        channels, taps = self.weight.shape
        return taps - 1, channels

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if order.steps is not None:
            made = order.steps.convolved(order.walk, states, given, self.weight, self.bias)
        elif order.library is not None and fits_convolution(states):
            made = convolved(order.library, order, states, given, self.weight, self.bias)
        else:
            made = self._by_torch(order, states, given)
        return made if self.activation is None else ACT2FN[self.activation](made)

    def _by_torch(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        taps = self.weight.float().T
        before = len(taps) - 1
        inputs = torch.cat([states[order.slots].flatten(0, 1), given])
        windows = order.windows(before)
        own = windows[order.accepted :]
        # Products and sums of whole rows, one after the other: no number depends on how many rows there are. Our kernel has
        # the same bits.
        made = torch.zeros_like(given[order.accepted :])
        for tap in range(before):
            made = made + inputs[own[:, tap]] * taps[tap]
        made = made + given[order.accepted :] * taps[before]
        if self.bias is not None:
            made = made + self.bias.float()
        ends = order.ends[:, None] + before * len(order.lines)
        states[order.slots] = inputs[torch.cat([windows[order.ends], ends], dim=1)[:, 1:]]
        return made
