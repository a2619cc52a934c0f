"""Long work over texts: grouped into passes of the target, and its progress shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# Called with a stage's name, the units done and their total.
Advance = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


# Tokens per pass, padding included.
_TOKENS = 2048

_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], length: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Group consecutive items into passes of about ``_TOKENS`` tokens, padding included; each has at least one item."""
    batch: list[_Item] = []
    longest = 0
    for item in items:
        longest = max(longest, length(item))
        if batch and (len(batch) + 1) * longest > _TOKENS:
            yield batch
            batch, longest = [], length(item)
        batch.append(item)
    if batch:
        yield batch
