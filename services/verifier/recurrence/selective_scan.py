"""Selective state spaces: Mamba's (Gu and Dao, 2312.00752, algorithm 2) and Mamba-2's (Dao and Gu, 2405.21060, section 6).

A state decays by a factor, and a row's input is added to it; both depend on the row. Products and sums are of whole rows,
and sums over a state's numbers are folded in halves, so that no number depends on which other rows step at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.verifier.kernels.whole_vectors import filled
from services.verifier.recurrence.folded import folded
from services.verifier.recurrence.levels import stepped
from services.verifier.recurrence.order import Order


@dataclass(frozen=True, kw_only=True, eq=False)
class Mamba2Scan:
    """Implements ``Recurrence``: each head has one decay; its state is [head size, state size].

    A row is given its heads' inputs, [heads, head size], their time steps, [heads], and two vectors for each group of heads,
    [groups, state size]: what writes to the state (B), and what reads it (C).

    Attributes:
        decay: [heads], A, below 0.
        skip: [heads], how much of an input is added to its output (D); None: nothing.
        step_bias: [heads], added to the time steps before ``softplus``.
        least_step, most_step: bounds of a time step.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    decay: torch.Tensor
    skip: torch.Tensor | None
    step_bias: torch.Tensor | None
    softplus: bool
    least_step: float
    most_step: float

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_size, self.state_size

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        vectors = self.groups * self.state_size
        inputs, times, writes, reads = torch.split(given, [self.width, self.heads, vectors, vectors], dim=1)
        inputs = inputs.reshape(-1, self.heads, self.head_size)
        times = _time_steps(times, self.step_bias, softplus=self.softplus).clamp(self.least_step, self.most_step)
        factors = filled("exp", times * self.decay.float())
        added = inputs * times[:, :, None]
        writes, reads = (self._of_heads(each) for each in (writes, reads))

        def step(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = decayed(state, factors[rows][:, :, None, None], added[rows][..., None] * writes[rows][:, :, None])
            return state, folded(state * reads[rows][:, :, None], 3).flatten(1)

        made = stepped(order, states, self.width, step)
        if self.skip is not None:
            made = made + (inputs * self.skip.float()[:, None]).flatten(1)[order.accepted :]
        return made

    def _of_heads(self, vectors: torch.Tensor) -> torch.Tensor:
        """[rows, heads, state size], from those of groups."""
        return vectors.reshape(-1, self.groups, self.state_size).repeat_interleave(self.heads // self.groups, dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class MambaScan:
    """Implements ``Recurrence``: each channel has as many decays as its state has numbers.

    A row is given its input and time steps, [channels] each, and two vectors for all channels, [state size]: what writes to
    the state (B), and what reads it (C).

    Attributes:
        decay: [channels, state size], A, below 0.
        skip: [channels], how much of an input is added to its output (D); None: nothing.
        step_bias: [channels], added to the time steps before ``softplus``.
    """

    decay: torch.Tensor
    skip: torch.Tensor | None
    step_bias: torch.Tensor | None
    softplus: bool

    @property
    def state_shape(self) -> tuple[int, ...]:
        channels, size = self.decay.shape
        return channels, size

    @property
    def width(self) -> int:
        return self.decay.shape[0]

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        size = self.decay.shape[1]
        inputs, times, writes, reads = torch.split(given, [self.width, self.width, size, size], dim=1)
        times = _time_steps(times, self.step_bias, softplus=self.softplus)
        added = inputs * times

        def step(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            factors = filled("exp", times[rows][..., None] * self.decay.float())
            state = decayed(state, factors, added[rows][..., None] * writes[rows][:, None])
            return state, folded(state * reads[rows][:, None], 2)

        made = stepped(order, states, self.width, step)
        return made if self.skip is None else made + (inputs * self.skip.float())[order.accepted :]


def decayed(state: torch.Tensor, factors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The states after rows: they decay, then something is added."""
    return state * factors + added


def _time_steps(times: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    times = times if bias is None else times + bias.float()
    return functional.softplus(times) if softplus else times
