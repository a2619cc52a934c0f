"""What models' mask functions let rows see, and which of them cannot be served."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from services.verifier.attention.masks import MaskFunction, Sight, sight_of

CPU = torch.device("cpu")
NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (causal_mask_function, Sight()),
        (sliding_window_causal_mask_function(2), Sight(window=2)),
        (sliding_window_causal_mask_function(37), Sight(window=37)),
        (sliding_window_causal_mask_function(499), Sight(window=499)),
        # What no position is far enough for is no window.
        (sliding_window_causal_mask_function(500), Sight()),
        (chunked_causal_mask_function(8, NO_PADDING), Sight(chunk=8)),
        (chunked_causal_mask_function(333, NO_PADDING), Sight(chunk=333)),
    ],
)
def test_what_rows_see(function: MaskFunction, expected: Sight) -> None:
    assert sight_of(function, 500, CPU) == expected


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (bidirectional_mask_function, "not causal"),
        (or_masks(causal_mask_function, lambda _b, _h, q, k: (q // 4) == (k // 4)), "not causal"),
        (and_masks(causal_mask_function, lambda _b, _h, _q, k: k % 3 != 0), "neither causal"),
        (and_masks(causal_mask_function, lambda _b, _h, q, k: (q - k < 20) | (k < 4)), "neither causal"),
        # Of a window that is switched off.
        (sliding_window_causal_mask_function(0), "neither causal"),
        (or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 8, dtype=torch.int64))), "more than positions"),
    ],
    ids=["everything", "blocks", "every third", "window and beginning", "nothing", "blocks of these tokens"],
)
def test_what_cannot_be_served(function: MaskFunction, reason: str) -> None:
    assert reason in sight_of(function, 500, CPU).reason


def test_a_mask_that_a_model_computes_with_says_so() -> None:
    assert Sight().to(torch.bool)[:, :, :, :3] == Sight()
    with pytest.raises(NotImplementedError, match="attention mask"):
        _ = Sight().dtype
