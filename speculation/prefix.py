"""A rolling 64-bit hash of a token prefix, so that a draft says in 16 bytes what it grows from."""

from __future__ import annotations

from collections.abc import Iterable

EMPTY_HASH = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def extend_hash(prefix_hash: int, tokens: Iterable[int]) -> int:
    """The hash of a prefix with hash ``prefix_hash`` followed by ``tokens`` (FNV-1a over whole token ids)."""
    for token in tokens:
        # The +1 and the shift keep token 0 and high bits from being lost: FNV's own step only moves bits upward.
        prefix_hash = ((prefix_hash ^ (token + 1)) * _PRIME) & _MASK
        prefix_hash ^= prefix_hash >> 29
    return prefix_hash
