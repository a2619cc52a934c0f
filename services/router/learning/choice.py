"""Chooses the strategy of a request where nobody else has: the fastest in its context, or ``auto``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.api.messages import ClientRequest
from services.router.learning.contexts import Context
from services.router.learning.counts import Counts
from services.router.rules.facts import Facts
from services.router.strategies import StrategyConfig
from speculation.sources import AUTO

# A strategy takes the place of ``auto`` only where answers take so much less time, beyond what may be chance.
LEAST_GAIN = 0.03
# Answers are replayed as if each was decoded alone, which tells nothing of a full house.
MOST_OPEN = 8


@dataclass(frozen=True, slots=True)
class LearntChoice:
    """A strategy, and why that one, in words; they tell nothing of other tenants."""

    strategy: str
    why: str


def why_left(request: ClientRequest, facts: Facts, config: StrategyConfig) -> str:
    """Why nothing is chosen for a request, nor learnt from it; empty: it may be.

    Only a request that leaves all of its drafting to the server is chosen for, and only where that changes no token.
    """
    named = (request.strategy, request.sources, request.num_speculative_tokens, request.effort, request.drafter)
    if any(value is not None for value in named) or config.strategy != AUTO:
        return "the request or the settings say how it is drafted"
    if (request.acceptance or config.acceptance) != "walk":
        return "its tokens depend on what is drafted"
    if request.private:
        return "it is private"
    # Other strategies do not draft from these, and under a grammar the verifier drafts as well.
    if request.prediction or request.group or facts.grammar:
        return "it has a prediction, a group or a form"
    return ""


def choose(counts: Counts, context: Context, strategies: Iterable[str], open_requests: int) -> LearntChoice:
    """The strategy whose answers take the least time in a context, where that is surely less than with ``auto``."""
    if open_requests > MOST_OPEN:
        return LearntChoice(AUTO, f"more than {MOST_OPEN} requests are open")
    best, lowest = LearntChoice(AUTO, "no strategy is surely faster for such prompts"), 1.0
    for strategy in strategies:
        found = counts.estimate(context, strategy)
        sure = found.cost <= 1 - LEAST_GAIN and found.cost + found.error < 1
        if sure and found.cost < lowest:
            gain = f"{100 * (1 - found.cost):.0f} % less time than {AUTO} for such prompts (± {100 * found.error:.0f} %)"
            best, lowest = LearntChoice(strategy, gain), found.cost
    return best
