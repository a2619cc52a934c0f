"""Groups texts into passes of the target while an index is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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
