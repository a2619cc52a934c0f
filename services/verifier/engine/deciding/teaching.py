"""What the budget learns from a pass: the cost of its rows, and what became of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from services.verifier.engine.passes import Part, PassSize
from speculation.budget import Budget


def teach(budget: Budget, parts: Sequence[Part], size: PassSize, seconds: float, *, slowed_s: float) -> None:
    """Update ``budget`` with a pass's time and its accepted paths.

    Args:
        seconds: that the target took; ``slowed_s``: how many of them because drafts were made meanwhile.
    """
    if size.prompts:
        budget.learn_prompts(size.load, seconds)
        return
    outcomes = [(part.tree, part.verdict.accepted_path) for part in parts if part.tree.tokens and part.verdict]
    # The table holds what rows cost while nobody drafts. What named requests' drafters take of the cores is not known.
    alone_s = budget.seconds(size.load) if size.named else max(0.5 * seconds, seconds - slowed_s)
    budget.learn(size.load, alone_s, outcomes)
