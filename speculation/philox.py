"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

A random number is a pure function of (seed, stream, position, index). There is no state, so a step that is replayed,
migrated or reordered draws the same numbers.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
# Added to the key's two words in every round.
_GROWTH = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MASK32 = 0xFFFFFFFF


class NoiseStream(enum.IntEnum):
    """What the numbers are used for; the streams of a seed are independent."""

    CHOICE = 0
    ACCEPT = 1
    RESIDUAL = 2


def philox4x32(counters: NDArray[np.uint64], seed: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten Philox rounds.

    Args:
        counters: [4, n], each below 2^32.
        seed: 64 bits, the key: one for all, or [n].

    Returns:
        [4, n], each below 2^32.
    """
    seeds = np.atleast_1d(np.asarray(seed, dtype=np.uint64))
    keys = (np.stack([seeds & _LOW, seeds >> _SHIFT]) + np.arange(10, dtype=np.uint64)[:, None, None] * _GROWTH) & _LOW
    even, odd = counters[0::2], counters[1::2]
    for key in keys:
        products = even * _MULTIPLIERS
        even = (products >> _SHIFT)[::-1] ^ odd
        even ^= key
        products &= _LOW
        odd = products[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


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
    # Four indices share a Philox block. A dense set (the whole vocabulary) computes each block once; a sparse one (top-k)
    # computes one block per index.
    dense = span <= len(indices)
    blocks = np.arange(first, first + span) if dense else wanted
    counters = np.zeros((4, len(blocks)), dtype=np.uint64)
    counters[0] = blocks.astype(np.uint64)
    counters[1] = np.uint64(int(stream))
    counters[2] = np.uint64(position & _MASK32)
    counters[3] = np.uint64(position >> 32)
    columns = wanted - first if dense else np.arange(len(indices))
    return _between_0_and_1(philox4x32(counters, seed)[indices & 3, columns])


def gumbel(seed: int, stream: NoiseStream, position: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise, -log(-log U), at each index; see ``uniforms``."""
    return _gumbel_of(uniforms(seed, stream, position, indices))


def gumbels(
    seeds: NDArray[np.uint64], stream: NoiseStream, positions: NDArray[np.int64], indices: NDArray[np.int64]
) -> NDArray[np.float64]:
    """``gumbel`` for several requests at once, bit for bit.

    Args:
        seeds, positions, indices: [n] each; entry i makes number i.
    """
    counters = np.zeros((4, len(indices)), dtype=np.uint64)
    counters[0] = indices >> 2
    counters[1] = int(stream)
    counters[2] = positions & _MASK32
    counters[3] = positions >> 32
    return _gumbel_of(_between_0_and_1(philox4x32(counters, seeds)[indices & 3, np.arange(len(indices))]))


def _between_0_and_1(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = (words.astype(np.float64) + 0.5) / 2.0**32
    return numbers


def _gumbel_of(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
