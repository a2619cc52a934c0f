"""What a layer with a state computes."""

from __future__ import annotations

from typing import Protocol

import torch

from services.verifier.recurrence.order import Order


class Recurrence(Protocol):
    """A function (state, row) -> (state, output).

    A row's numbers depend on its path alone: on what it is given, what the rows before it were given, and the state before
    those. They are the same bits, however a text is cut into passes, and whatever else a pass holds.
    """

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a request's state, in float32."""
        ...

    @property
    def width(self) -> int:
        """Numbers of a row's output."""
        ...

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Compute the rows of a pass, and change the states to those at the ends of the requests' chains.

        Args:
            states: [slots, *state_shape], of all requests.
            given: [accepted + rows, numbers]: first the rows of ``Order.accepted``, then those of the pass.

        Returns:
            [rows, width], of the pass's rows.
        """
        ...


class Steps(Protocol):
    """Answers the layers of one pass, in the order in which the model calls them."""

    def step(self, recurrence: Recurrence, given: torch.Tensor) -> torch.Tensor:
        """What the next layer computes: [rows, numbers] to [rows, width]."""
        ...
