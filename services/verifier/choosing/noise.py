"""Gumbel noise on any device, close enough to that of speculation/philox.py to find the few tokens that can win."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.verifier.choosing.candidates import Candidates, at_least
from speculation.philox import NoiseStream

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_GROWTH = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# Far above the difference between two implementations of a float64 logarithm.
_SLACK = 1e-6


def words(
    seeds: Sequence[int], stream: NoiseStream, positions: Sequence[int], size: int, device: torch.device
) -> torch.Tensor:
    """The random words of speculation/philox.py for indices 0 to ``size`` - 1, row by row: [rows, size], int64."""

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    blocks = torch.arange(-(-size // 4), dtype=torch.int64, device=device)[None]
    keys = [column([seed & _LOW for seed in seeds]), column([seed >> 32 for seed in seeds])]
    c0, c1 = blocks.expand(len(seeds), -1), column([int(stream)] * len(seeds))
    c2, c3 = column([position & _LOW for position in positions]), column([position >> 32 for position in positions])
    for _ in range(10):
        # Signed products wrap around in 64 bits; the upper half is right once the sign extension is masked away.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ keys[0], p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ keys[1], p0 & _LOW
        keys = [(key + growth) & _LOW for key, growth in zip(keys, _GROWTH, strict=True)]
    return torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)[:, :size]


def likely_winners(logits: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[Candidates | None]:
    """For each row, the tokens that may have the greatest sum of logit and noise; None if that sum is not finite.

    Args:
        logits: [rows, vocabulary], float32, on any device.
    """
    uniform = (words(seeds, NoiseStream.CHOICE, positions, logits.shape[1], logits.device).double() + 0.5) / 2.0**32
    noisy = logits.double() - torch.log(-torch.log(uniform))
    tops = noisy.amax(-1)
    found = at_least(noisy, (tops - _SLACK * (1 + tops.abs())).tolist(), logits)
    return [
        Candidates(ids=ids, weights=values.astype(np.float64)) if np.isfinite(top) else None
        for (ids, values), top in zip(found, tops.tolist(), strict=True)
    ]
