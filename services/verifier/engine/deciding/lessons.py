"""What a loop learns from a pass before it delivers the results: what drafts and rows cost, and what became of nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from services.verifier.engine.deciding.asking import Prices, known_prices
from services.verifier.engine.deciding.named_share import NamedShare
from services.verifier.engine.deciding.step_contest import StepContest
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.passes import Part, PassSize, PassWork
from speculation.budget import Budget
from speculation.costs import Load

log = logging.getLogger(__name__)


class PassTimes(NamedTuple):
    """Seconds of a pass: ``target_s`` in the target, ``seconds`` until its result was here, ``whole_s`` since the one before
    it had ended.
    """

    target_s: float
    seconds: float
    whole_s: float


class Lessons:
    """Those of one loop, for all who decide in it."""

    def __init__(self, budget: Budget, drafting: Drafting, contest: StepContest, named: NamedShare) -> None:
        self._budget, self._drafting = budget, drafting
        self._contest, self._named = contest, named

    def learn(self, work: PassWork, size: PassSize, took: PassTimes, load: Load, *, speculates: bool) -> Prices | None:
        """Learn from a pass; see ``StepContest.learn``, too. Returns what time costs in the coming step, if that is known.

        Args:
            load: of the coming step, without drafts.
        """
        busy, prices = self._drafting.costs.busy(work.parts), None
        try:
            self._drafting.learn(work.requests, size, busy, took.seconds, took.whole_s, self._budget.seconds(size.load))
            prices = known_prices(load, self._budget)
        except Exception:
            log.exception("learning the cost of drafts from a pass failed")
        self._contest.learn(work, size, took.whole_s, busy=any(busy.values()), speculates=speculates)
        teach(self._budget, work.parts, size, took.target_s, slowed_s=self._drafting.costs.slowed_s(busy))
        if 0 < size.named < size.parts:
            self._named.passed(took.seconds)
        return prices


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
