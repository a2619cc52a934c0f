"""A rolling 64-bit hash of tokens. A draft names its prefix by this hash."""

from __future__ import annotations

from collections.abc import Iterable

EMPTY_HASH = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def extend_hash(prefix_hash: int, tokens: Iterable[int]) -> int:
    """The hash of a prefix followed by ``tokens``, from the prefix's own hash (FNV-1a over whole token ids)."""
    for token in tokens:
        # FNV's own step moves bits upward only. The +1 makes token 0 count, the shift brings high bits back down.
        prefix_hash = ((prefix_hash ^ (token + 1)) * _PRIME) & _MASK
        prefix_hash ^= prefix_hash >> 29
    return prefix_hash
