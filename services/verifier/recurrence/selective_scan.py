"""Selective state spaces: Mamba's (Gu and Dao, 2312.00752, algorithm 2) and Mamba-2's (Dao and Gu, 2405.21060, section 6).

A state decays by a factor, and a row's input is added to it; both depend on the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.verifier.kernels.whole_vectors import filled
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.keyed_states import read
from services.verifier.recurrence.order import Order


@dataclass(frozen=True, kw_only=True, eq=False)
class Mamba2Scan:
    """Implements ``Recurrence``: each head has one decay; its state is [state size, head size].

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
        return self.heads, self.state_size, self.head_size

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        vectors = self.groups * self.state_size
        inputs, times, writes, reads = torch.split(given, [self.width, self.heads, vectors, vectors], dim=1)
        inputs = inputs.reshape(-1, self.heads, self.head_size)
        times = _time_steps(times, self.step_bias, softplus=self.softplus).clamp(self.least_step, self.most_step)
        rows = KeyedRows(
            keys=writes.reshape(-1, self.groups, self.state_size),
            queries=reads.reshape(-1, self.groups, self.state_size),
            values=inputs * times[:, :, None],
            factors=filled("exp", times * self.decay.float())[:, :, None],
        )
        made = read(order, states, rows)
        if self.skip is not None:
            made = made + (inputs * self.skip.float()[:, None]).flatten(1)[order.accepted :]
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class MambaScan:
    """Implements ``Recurrence``: each channel has as many decays as its state has numbers.

    The state is [1, state size, channels]. A row is given its input and time steps, [channels] each, and two vectors for all
    channels, [state size]: what writes to the state (B), and what reads it (C).

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
        return 1, size, channels

    @property
    def width(self) -> int:
        return self.decay.shape[0]

    def compute(self, order: Order, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        size = self.decay.shape[1]
        inputs, times, writes, reads = torch.split(given, [self.width, self.width, size, size], dim=1)
        times = _time_steps(times, self.step_bias, softplus=self.softplus)
        rows = KeyedRows(
            keys=writes[:, None],
            queries=reads[:, None],
            values=(inputs * times)[:, None],
            times=times[:, None],
            decay=self.decay.float().T.contiguous()[None],
        )
        made = read(order, states, rows)
        return made if self.skip is None else made + (inputs * self.skip.float())[order.accepted :]


def _time_steps(times: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    times = times if bias is None else times + bias.float()
    return functional.softplus(times) if softplus else times
