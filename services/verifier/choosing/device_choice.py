"""Chooses tokens on the logits' device, so that only ids come to the host.

The noise has the same integers everywhere, but logarithms, and the sums that top-p is about, may differ in their last bits
from device to device. So nothing is decided within the reach of rounding: a token wins if its lead exceeds what rounding can
do, and if it is left by top-k, top-p and min-p however sums are rounded. Otherwise the caller asks the law itself for the
row. That is rare: the winner would have to be one of the few tokens at the very limit, or all but equal to another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from services.verifier.choosing.candidates import ERROR, LANE_ERROR, LEAST_MIN_P, RATIO_ERROR
from services.verifier.choosing.greatest import own_kernel
from services.verifier.model.target_port import NOT_CHOSEN
from services.verifier.model.to_device import to_device
from speculation.philox import NoiseStream
from speculation.types import SamplingParams

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


class Winners(Protocol):
    """Finds what wins; see ``winners_by_torch``."""

    def __call__(
        self,
        logits: torch.Tensor,
        perhaps: torch.Tensor,
        seeds: Sequence[int],
        positions: Sequence[int],
        stream: NoiseStream,
        first: int = 0,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


# Far above the difference between two implementations of a float64 logarithm.
SLACK = 1e-6
# Most numbers of a turn: each takes some hundred bytes for a moment.
_AT_ONCE = 2**22


class Limits(NamedTuple):
    """What truncation leaves of rows, by the least logit of each: [rows], float64.

    Attributes:
        perhaps: tokens below are removed however sums are rounded.
        surely: tokens from here on are left however sums are rounded.
    """

    perhaps: torch.Tensor
    surely: torch.Tensor


def rows_at_once(vocabulary: int) -> int:
    """How many rows are worked on at a time."""
    return max(1, _AT_ONCE // vocabulary)


def drawn(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """The law's choice after each row; ``NOT_CHOSEN`` where rounding could decide, or no token can be chosen.

    Args:
        logits: [rows, vocabulary], float32, divided by the temperature; on any device.
        params, positions: [rows].
    """
    some = rows_at_once(logits.shape[1])
    parts = [
        _drawn(logits[start : start + some], params[start : start + some], positions[start : start + some])
        for start in range(0, len(logits), some)
    ]
    found: list[int] = torch.cat(parts).tolist()
    return found


def _drawn(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    limits = limits_of(logits, params)
    seeds = [own.seed for own in params]
    best, ids, others = winners_on(logits.device)(logits, limits.perhaps, seeds, positions, NoiseStream.CHOICE)
    values = logits.gather(-1, ids[:, None])[:, 0].double()
    # Written so that NaN counts as undecided.
    leads = best - others > SLACK * (1 + best.abs())
    decided = leads & torch.isfinite(logits.amax(-1)) & torch.isfinite(best) & (values >= limits.surely)
    return torch.where(decided, ids, NOT_CHOSEN)


@functools.cache
def winners_on(device: torch.device) -> Winners:
    """How winners are found on a device: by one kernel of ours where it runs and is right, else by torch's functions."""
    return right_winners(device, _our_kernel)


def _our_kernel() -> Winners:
    from services.verifier.kernels.triton import choice_kernels

    return choice_kernels.noisy_winners


def right_winners(device: torch.device, load: Callable[[], Winners]) -> Winners:
    """What ``load`` gives where it runs on a device and is right there, else torch's functions."""

    def is_right(winners: Winners) -> bool:
        rows = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(device)
        least = torch.zeros(2, dtype=torch.float64, device=device)
        given = (rows, least, [3, 2**64 - 1], [7, 2**33], NoiseStream.CHOICE, 2)
        found, expected = winners(*given), winners_by_torch(*given)
        return torch.equal(found[1], expected[1]) and torch.allclose(found[0], expected[0], atol=SLACK / 100)

    return own_kernel(device, load, is_right, "tokens are drawn") or winners_by_torch


def winners_by_torch(
    logits: torch.Tensor,
    perhaps: torch.Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    stream: NoiseStream,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The greatest logit plus noise of each row, its column, and the second greatest: [rows] each, float64, int64, float64.

    Args:
        logits: [rows, vocabulary], float32 or float64.
        perhaps: [rows], float64; lesser logits do not take part.
        first: the token of the first column.
    """
    noise = words(seeds, stream, positions, first + logits.shape[1], logits.device)[:, first:]
    uniform = (noise.double() + 0.5) / 2.0**32
    values = logits.double()
    noisy = (values - torch.log(-torch.log(uniform))).masked_fill(values < perhaps[:, None], -torch.inf)
    best, ids = noisy.max(-1, keepdim=True)
    return best[:, 0], ids[:, 0], noisy.scatter(-1, ids, -torch.inf).amax(-1)


def limits_of(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Limits:
    """What top-k, top-p and min-p leave of each row, in this order, as transformers' own.

    Args:
        logits: [rows, vocabulary], float32, divided by the temperature; on any device.
    """
    rows, vocabulary = logits.shape
    limits = Limits(*(logits.new_full((rows,), -torch.inf, dtype=torch.float64) for _ in range(2)))
    _cut_by_count(logits, [own.top_k if 0 < own.top_k < vocabulary else 0 for own in params], limits)
    _cut_by_mass(logits, [own.top_p for own in params], limits)
    _cut_by_ratio(logits, [own.min_p for own in params], limits)
    return limits


def _cut_by_count(logits: torch.Tensor, counts: Sequence[int], limits: Limits) -> None:
    at, wanted = _chosen(counts, [count > 0 for count in counts], logits.device)
    if len(at):
        values = logits[at].topk(max(counts)).values
        least = values.gather(1, wanted.long()[:, None] - 1)[:, 0].double()
        for limit in limits:
            limit[at] = least


def _cut_by_mass(logits: torch.Tensor, top_ps: Sequence[float], limits: Limits) -> None:
    """transformers sorts ascending and removes each token up to which probabilities sum to at most 1 - top_p, in float32."""
    outsides = [float(np.float32(1 - top_p)) for top_p in top_ps]
    at, outside = _chosen(outsides, [top_p < 1 for top_p in top_ps], logits.device)
    if not len(at):
        return
    own, vocabulary = logits[at], logits.shape[1]
    ordered = own.masked_fill(own < limits.perhaps[at, None], -torch.inf).sort(-1, descending=True).values.double()
    shares = (ordered - ordered[:, :1]).exp()
    total, outside = shares.sum(-1, keepdim=True), outside[:, None]
    before = (shares.cumsum(-1) - shares) / total
    # The error of a sum of ascending numbers grows with its partial sums, which are small until the likely tokens come.
    likely = shares >= outside * total / vocabulary
    tail = 1 - (shares * likely).sum(-1, keepdim=True) / total
    error = ERROR + outside * LANE_ERROR * (vocabulary * tail + likely.sum(-1, keepdim=True))
    possible = ordered > -torch.inf
    least, most = (
        ((before < 1 - outside + reach) & possible).sum(-1, keepdim=True).clamp(min=1) for reach in (-error, error)
    )
    limits.perhaps[at] = torch.maximum(limits.perhaps[at], ordered.gather(1, most - 1)[:, 0])
    # Of equal logits on both sides, any may be removed: sure are those above the first that may be.
    first_out = torch.nn.functional.pad(ordered, (0, 1), value=-torch.inf).gather(1, least)
    above = torch.where(first_out > -torch.inf, first_out.nextafter(torch.full_like(first_out, torch.inf)), -torch.inf)
    limits.surely[at] = torch.maximum(limits.surely[at], above[:, 0])


def _cut_by_ratio(logits: torch.Tensor, min_ps: Sequence[float], limits: Limits) -> None:
    at, least = _chosen([float(np.float32(min_p)) for min_p in min_ps], [min_p > 0 for min_p in min_ps], logits.device)
    if not len(at):
        return
    tops = logits[at].amax(-1).double()
    below, above = (tops + torch.log(least * (1 + reach)) for reach in (-2 * RATIO_ERROR, 2 * RATIO_ERROR))
    limits.perhaps[at] = torch.maximum(limits.perhaps[at], torch.minimum(tops, below))
    # A product of probabilities this small may have lost digits.
    sure = torch.where(least < LEAST_MIN_P, torch.inf, torch.minimum(tops, above))
    limits.surely[at] = torch.maximum(limits.surely[at], sure)


def _chosen(values: Sequence[float], wanted: Sequence[bool], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that are ``wanted``, and their values, float64; both on the device."""
    at = [row for row, own in enumerate(wanted) if own]
    return to_device(at, device, torch.int64), to_device([values[row] for row in at], device, torch.float64)
