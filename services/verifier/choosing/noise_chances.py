"""How likely the likeliest ids after rows of noise are, which drafters by noise read."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.verifier.choosing.candidates import rows_of
from services.verifier.choosing.walks import Walk
from services.verifier.model.target_port import Outcome


def with_chances(outcome: Outcome, walk: Walk, logits: torch.Tensor) -> Outcome:
    """The outcome, with how likely the likeliest ids after its rows of noise are."""
    rows, tops = walk.rows, outcome.top_ids
    if not rows.noise or not tops:
        return outcome
    noise = [row - (rows.chain - 1) for row in rows.noise]
    logs = rows_of(logits, [walk.first_row + row for row in noise]).log_softmax(-1)
    ids = torch.tensor([tops[row] for row in noise], device=logits.device)
    chances: list[tuple[float, ...]] = [()] * len(tops)
    for row, own in zip(noise, logs.gather(1, ids).exp().tolist(), strict=True):
        chances[row] = tuple(own)
    return replace(outcome, chances=tuple(chances))
