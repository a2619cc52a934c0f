"""What a pass teaches the budget."""

from __future__ import annotations

from collections.abc import Sequence

from services.verifier.engine.drafting import Drafting
from services.verifier.engine.passes import Part, load_of, named_parts
from speculation.budget import Budget


def learn(budget: Budget, drafting: Drafting, parts: Sequence[Part], seconds: float) -> None:
    """Update the budget with a pass's time and its accepted paths."""
    if any(part.chain > 1 for part in parts):
        budget.learn_prompts(load_of(parts), seconds)
        return
    load = load_of(parts)
    outcomes = [(part.tree, part.verdict.accepted_path) for part in parts if part.verdict is not None and len(part.tree)]
    # The table holds what rows cost while nobody drafts. What named requests' drafters take of the cores is not known.
    alone_s = budget.seconds(load) if named_parts(parts) else max(0.5 * seconds, seconds - drafting.slowed_s(parts))
    budget.learn(load, alone_s, outcomes)
