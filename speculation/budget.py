"""How many drafted nodes a step may check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Budget(Protocol):
    """A policy. 0 means plain decoding."""

    @property
    def max_nodes(self) -> int:
        """Never more than this."""
        ...

    def nodes(self, live_requests: int) -> int:
        """Most nodes of one request's tree in the coming step, with ``live_requests`` requests in the batch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBudget:
    """The same at any load."""

    max_nodes: int

    def nodes(self, live_requests: int) -> int:
        """See ``Budget``."""
        return self.max_nodes
