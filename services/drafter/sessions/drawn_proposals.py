"""Draws a token from a draft distribution q, and says what q was, as speculation/rejection.py needs it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from speculation import limits
from speculation.types import Proposal

# Draws an index with the probabilities [n] that it is given, which are positive and have sum 1.
Draw = Callable[[NDArray[np.float64]], int]


def draw_with(generator: np.random.Generator | None = None) -> Draw:
    """A function that draws by the numbers of ``generator``, which nothing that the target chooses may depend on.

    Args:
        generator: None: one of the system's own entropy, since answers to equal prompts must not share their drafts.
    """
    numbers = generator or np.random.default_rng()

    def draw(weights: NDArray[np.float64]) -> int:
        found = int(np.searchsorted(np.cumsum(weights), numbers.random(), side="right"))
        # Rounding may leave the sum below the number drawn.
        return min(found, len(weights) - 1)

    return draw


def drawn_from(ids: NDArray[np.int64], q: NDArray[np.float64], draw: Draw) -> tuple[int, Proposal]:
    """Draw from q, cut first to what a proposal can hold: tokens are drawn from the very distribution that is sent along.

    Args:
        ids: [n], likeliest first.
        q: [n], their probabilities, up to a factor.

    Returns:
        Which of the proposal's tokens was drawn, and the proposal.
    """
    ids, q = ids[: limits.MAX_PROPOSAL], q[: limits.MAX_PROPOSAL]
    # As it will travel, in float32; and drawn from as the rule will read it, with sum 1.
    sent = (q / q.sum()).astype(np.float32).astype(np.float64)
    ids, sent = ids[sent > 0], sent[sent > 0]
    drawn = draw(sent / sent.sum())
    return drawn, Proposal(token_ids=tuple(ids.tolist()), probabilities=tuple(sent.tolist()))
