"""Passes whose tensors keep their addresses, so that a captured graph can replay them, and which of them share a graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from services.verifier.attention.calls import Pass
from services.verifier.target_port import Rows

# Passes of more rows compute for longer than their launches take.
MOST_ROWS = 256


class FixedPass(Pass, Protocol):
    """A pass that is laid out anew in the same memory; what it launches depends on its bucket alone."""

    @property
    def tokens(self) -> torch.Tensor:
        """[rows], int64: the rows' tokens, padding included."""
        ...

    def fill(self, batch: Sequence[Rows]) -> None:
        """Lay out ``batch``, which must fit the bucket; the remaining rows are padding."""
        ...


class Buckets(Protocol):
    """Says which passes are alike."""

    def bucket(self, batch: Sequence[Rows]) -> Hashable | None:
        """The bucket of a pass; None if it is larger than any."""
        ...

    def make(self, bucket: Any) -> FixedPass:
        """A pass for what ``bucket`` gave."""
        ...


def rounded_up(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()
