"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

A random number is a pure function of (seed, stream, position, index). There is no state to carry, lose or share, so a step
that is replayed, migrated or reordered draws the same numbers.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MASK32 = 0xFFFFFFFF


class NoiseStream(enum.IntEnum):
    """What the numbers are used for; the streams of a seed are independent."""

    CHOICE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def philox4x32(counters: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Ten Philox rounds.

    Args:
        counters: [4, n], each below 2^32.
        seed: 64 bits, the key.

    Returns:
        [4, n], each below 2^32.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return np.stack([c0, c1, c2, c3])


def uniforms(seed: int, stream: NoiseStream, position: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in (0, 1) with 32 random bits for each index (a token id or an ordinal).

    Args:
        indices: [n], each below 2^34.

    Returns:
        [n]. The number at an index does not depend on the other indices.
    """
    wanted = indices >> 2
    first = int(wanted.min()) if len(indices) else 0
    span = int(wanted.max()) - first + 1 if len(indices) else 0
    # Four indices share a block. A dense set (the whole vocabulary) computes each block once; a sparse one (top-k) computes
    # one block per index.
    dense = span <= len(indices)
    blocks = np.arange(first, first + span) if dense else wanted
    counters = np.zeros((4, len(blocks)), dtype=np.uint64)
    counters[0] = blocks.astype(np.uint64)
    counters[1] = np.uint64(int(stream))
    counters[2] = np.uint64(position & _MASK32)
    counters[3] = np.uint64(position >> 32)
    columns = wanted - first if dense else np.arange(len(indices))
    words = philox4x32(counters, seed)[indices & 3, columns]
    result: NDArray[np.float64] = (words.astype(np.float64) + 0.5) / 2.0**32
    return result


def gumbel(seed: int, stream: NoiseStream, position: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise, -log(-log U), at each index; see ``uniforms``."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniforms(seed, stream, position, indices)))
    return noise
