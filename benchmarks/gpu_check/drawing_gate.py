"""G9: whether tokens are drawn by their law, and are those that a CPU draws with the same seeds."""

from __future__ import annotations

import math

import torch

from benchmarks.gpu_check.verdicts import GateVerdict
from services.verifier.choosing.device_choice import SLACK, Winners, winners_by_torch
from services.verifier.kernels.triton.choice_kernels import noisy_winners
from speculation.philox import NoiseStream

# Draws that a token is expected to have at least; rarer ones count as one.
_EXPECTED = 5.0
# Standard deviations of chi-square's statistic: one honest run in a million is beyond.
_MOST = 5.0


def drawing(device: str, draws: int = 10_000, vocabulary: int = 3000, *, winners: Winners = noisy_winners) -> GateVerdict:
    """G9: ``draws`` tokens, each with a seed of its own, by one row of logits."""
    row = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    logits, anything = row.expand(draws, -1), torch.full((draws,), -torch.inf, dtype=torch.float64)
    seeds, positions = range(draws), [7] * draws
    best, ids, second = (each.cpu() for each in winners(
        logits.to(device), anything.to(device), seeds, positions, NoiseStream.CHOICE
    ))  # fmt: skip
    _, expected, _ = winners_by_torch(logits, anything, seeds, positions, NoiseStream.CHOICE)
    # Where a lead is within rounding, a verifier leaves the row to the CPU.
    sure = best - second > SLACK
    return judge_drawing(int((sure & (ids != expected)).sum()), int((~sure).sum()), distance(row, ids), draws)


def distance(row: torch.Tensor, ids: torch.Tensor) -> float:
    """How far drawn tokens are from the softmax of a row, by chi-square, in standard deviations."""
    wanted = row.double().softmax(-1) * len(ids)
    found = torch.bincount(ids, minlength=len(row)).double()
    often = wanted >= _EXPECTED
    wanted, found = (torch.cat([each[often], each[~often].sum()[None]]) for each in (wanted, found))
    free = len(wanted) - 1
    return float(((found - wanted).square() / wanted).sum() - free) / math.sqrt(2 * free)


def judge_drawing(differ: int, unsure: int, far: float, draws: int) -> GateVerdict:
    """The verdict on tokens that a CPU would not draw, and on their law."""
    good = not differ and far < _MOST
    return GateVerdict(
        result="pass" if good else "fail",
        found=f"{differ} of {draws} tokens are not those that a CPU draws, {unsure} would be left to it; chi-square is "
        f"{far:.1f} standard deviations above its mean",
        follows="drawn answers are plain decoding's" if good else "compare the noise's integers with speculation/philox.py",
        figures={"differ": differ, "unsure": unsure, "standard_deviations": far},
    )
