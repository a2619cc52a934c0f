"""Passes with tensors at fixed addresses, as captured graphs need them, and the buckets of passes that share a graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.verifier.attention.calls import MAX_NODES, Pass
from services.verifier.config import TargetConfig
from services.verifier.model.target_port import Rows

# Passes of more rows compute for longer than their launches take.
MOST_ROWS = 512


class FixedPass(Pass, Protocol):
    """A pass that is laid out anew in the same memory; what it launches depends on its bucket alone."""

    @property
    def tokens(self) -> torch.Tensor:
        """[rows], int64: the rows' tokens, padding included."""
        ...

    def fill(self, batch: Sequence[Rows]) -> None:
        """Lay out ``batch``, which must fit the bucket; the remaining rows are padding. It waits for nothing."""
        ...

    def enter(self) -> None:
        """Take from there what the pass is: launched before everything else, and captured with it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest passes that the settings allow: rows, requests, and positions of one request."""

    rows: int
    requests: int
    positions: int


def largest_pass(config: TargetConfig) -> Largest:
    """The largest passes of a target. A full-length request has room for the largest tree behind its tokens."""
    # Smaller caches than a request may fill are sized up as well, to say what would fit.
    tokens = min(config.max_model_len or config.cache_tokens, config.cache_tokens)
    return Largest(rows=config.pass_rows, requests=config.pass_requests, positions=tokens + MAX_NODES)


class Buckets(Protocol):
    """Says which passes are alike."""

    def allowed(self, largest: Largest) -> Sequence[Hashable]:
        """The buckets of all passes up to ``largest``, those that need most memory first."""
        ...

    def bucket(self, batch: Sequence[Rows]) -> Hashable | None:
        """The bucket of a pass; None if it is larger than any."""
        ...

    def make(self, bucket: Any) -> FixedPass:
        """A pass for what ``bucket`` gave."""
        ...


def rounded_up(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()


def rows_up(rows: int) -> int:
    """Rows, padding included, of the pass that is captured for so many.

    A power of two up to 8; then a multiple of 8 up to 64, of 16 up to 128, and of 32 from there.
    """
    if rows <= 8:
        return rounded_up(rows)
    step = 8 if rows <= 64 else 16 if rows <= 128 else 32
    return -(-rows // step) * step


def row_steps(most: int) -> list[int]:
    """All that ``rows_up`` gives for up to ``most`` rows, the greatest first."""
    return sorted({rows_up(rows) for rows in range(1, most + 1)}, reverse=True)


def steps(most: int) -> list[int]:
    """The powers of two up to the first that is at least ``most``, the greatest first."""
    return [1 << power for power in reversed(range(rounded_up(most).bit_length()))]
