"""How a device other than a CPU steps over the rows of a pass."""

from __future__ import annotations

from typing import Protocol

import torch

from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.walks import StateWalk


class DeviceSteps(Protocol):
    """Kernels of a device. Each steps over all rows of a pass, and changes states to those at the ends of the chains.

    Rows are float32: first accepted ones, then the pass's own, as ``Order`` counts them. What is returned is the pass's own
    rows; those of padding are zeros, or arbitrary numbers where that is said. States are kept where the walk says so.
    """

    def refusal(self, shape: tuple[int, ...]) -> str:
        """Why states of this shape cannot be stepped; empty if they can."""
        ...

    def keyed(self, walk: StateWalk, states: torch.Tensor, rows: KeyedRows) -> torch.Tensor:
        """As ``keyed_states.read``."""
        ...

    def units(self, vectors: torch.Tensor, epsilon: float) -> torch.Tensor:
        """[rows, heads, size], each divided by its length; ``epsilon`` is added to the sum of squares."""
        ...

    def convolved(
        self, walk: StateWalk, states: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As ``ShortConvolution``, without its activation; padding is arbitrary.

        Args:
            states: [slots, taps - 1, channels].
            given: [rows, channels].
            weight: [channels, taps]; ``bias``: [channels]. Of any type.
        """
        ...

    def scanned(self, walk: StateWalk, states: torch.Tensor, factors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """As ``GatedScan``; all are [..., width]."""
        ...

    def averaged(
        self,
        walk: StateWalk,
        states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decay: torch.Tensor,
        first: torch.Tensor,
    ) -> torch.Tensor:
        """As ``WeightedMean``: keys and values are [rows, channels], ``decay`` and ``first`` [channels]."""
        ...
