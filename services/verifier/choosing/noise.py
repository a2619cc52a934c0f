"""The random integers of speculation/philox.py on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.verifier.model.to_device import to_device
from speculation.philox import NoiseStream

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_GROWTH = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def words(
    seeds: Sequence[int], stream: NoiseStream, positions: Sequence[int], size: int, device: torch.device
) -> torch.Tensor:
    """The random words of speculation/philox.py for indices 0 to ``size`` - 1, row by row: [rows, size], int64."""

    def column(values: Sequence[int]) -> torch.Tensor:
        return to_device(values, device, torch.int64)[:, None]

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
