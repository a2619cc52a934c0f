"""Telling how far a long piece of work has come."""

from __future__ import annotations

from collections.abc import Callable

# Of a stage by its name: how much is done, of how much.
Advance = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Nobody asks."""
