"""The native kernel that finds the likeliest ids: as sorting says, on every instruction set, and a wrong one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from tests.kernels.kernels_here import SETS, kernels_of, planted_kernels

SIZES = (1, 15, 63, 64, 65, 200, 1000, 49152)


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Library:
    return kernels_of(request.param)


def by_sorting(row: torch.Tensor, k: int) -> tuple[int, ...]:
    """Of equals the first one first; what is not a number counts as -inf."""
    kept = torch.where(row.isnan(), -torch.inf, row).tolist()
    return tuple(sorted(range(len(row)), key=lambda id: (-kept[id], id))[:k])


def check(kernels: Library) -> None:
    kernel, random = LikeliestKernel(kernels), torch.Generator().manual_seed(1)
    for vocabulary in SIZES:
        logits = torch.randn(5, vocabulary, generator=random)
        # Many equals; both ends; descending; and neighbours that are no numbers.
        logits[1] = logits[1].mul(2).round()
        logits[2, 0] = logits[2, -1] = 9.0
        logits[3] = logits[3].sort(descending=True).values
        logits[4, ::3] = torch.nan
        logits[4, 1::5] = -torch.inf
        order = [by_sorting(row, vocabulary) for row in logits]
        for k in (1, 2, 8, 64):
            for rows in ([0, 1, 2, 3], [4], [3, 0]):
                enough = all((logits[row] > -torch.inf).sum() >= k for row in rows)
                expected = [order[row][:k] for row in rows] if enough else None
                assert kernel.find(logits, rows, k) == expected, (vocabulary, k, rows)


def test_as_sorting_says(kernels: Library) -> None:
    check(kernels)


def test_rows_that_lie_apart(kernels: Library) -> None:
    logits = torch.randn(6, 300)[::2, :200]
    assert LikeliestKernel(kernels).find(logits, [2, 0], 3) == [by_sorting(logits[2], 3), by_sorting(logits[0], 3)]


def test_what_it_cannot_read_is_refused(kernels: Library) -> None:
    kernel = LikeliestKernel(kernels)
    assert kernel.find(torch.randn(1, 200), [0], 65) is None
    for logits in (torch.randn(2, 200).double(), torch.randn(200, 2).T):
        with pytest.raises(ValueError, match="float32"):
            kernel.find(logits, [0], 2)
    for row in (-1, 2):
        with pytest.raises(ValueError, match="there are 2"):
            kernel.find(torch.randn(2, 200), [0, row], 2)


WRONG = {
    "the last of equals": ("values[at - 1] < value", "values[at - 1] <= value"),
    "the end is left out": ("end = vocabulary;", "break;"),
    "the limit of the row before": ("float values[MOST], least", "static float values[MOST], least"),
    "one vector of four": ("v < COMPARED / LANES", "v < 1"),
    "too low a limit": ("least = values[count - 1]", "least = values[0]"),
}


@pytest.mark.examples(5)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(wrong: str, tmp_path: Path) -> None:
    planted = planted_kernels("likeliest.c", WRONG[wrong], tmp_path)
    with pytest.raises(AssertionError):
        check(planted)
