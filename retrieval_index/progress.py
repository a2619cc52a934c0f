"""Progress of long work."""

from __future__ import annotations

from collections.abc import Callable

# Called with a stage's name, the units done and their total.
Advance = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
