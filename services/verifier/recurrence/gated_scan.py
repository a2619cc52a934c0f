"""The real-gated linear recurrent unit (De et al., 2402.19427, section 2.4): each number of a state has its own decay."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.verifier.kernels.native.vector_kernel import fits, scanned
from services.verifier.recurrence.levels import stepped
from services.verifier.recurrence.order import Order


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedScan:
    """Implements ``Recurrence``: a row's output is its state, [width].

    It is given the factors by which the state decays, [width], and what is added then, [width].
    """

    width: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.width,)

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        factors, added = torch.split(given.contiguous(), self.width, dim=1)
        if order.steps is not None:
            return order.steps.scanned(order.walk, states, factors, added)
        if order.library is not None and fits(states):
            return scanned(order.library, order, states, factors, added)

        def step(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = decayed(state, factors[rows], added[rows])
            return state, state

        return stepped(order, states, self.width, step)


def decayed(state: torch.Tensor, factors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The states after rows: they decay, then something is added. Our kernel has the same bits."""
    return state * factors + added
