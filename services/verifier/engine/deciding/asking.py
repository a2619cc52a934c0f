"""Decides how often an origin is asked for drafts: at every step where that pays (architecture, law 3). Uses no clock.

A drafter on the target's own cores slows the passes down, whether or not its drafts are used. What one request for a draft
costs is measured: seconds of passes with drafting under way, against those without. Where a request's drafts bring less, its
reports are held back and sent together, so that fruitless drafting takes a small share of all pass time. A text that begins
to repeat itself is a reason to ask at once: what look-up would have had right is known without a draft. Where drafting
slows no pass, it costs nothing, and every step is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.verifier.engine.deciding.cost_slope import CostSlope
from services.verifier.engine.deciding.waiting import Worth
from speculation.budget import Budget
from speculation.costs import Load

# Share of all pass time that fruitless drafting may take, and the most steps that one report tells of.
_SHARE = 0.01
MOST_STEPS = 32
# A pass in so many goes without drafting, until the cost is known and afterwards, so that there is something to compare.
_QUIET_EVERY, _QUIET_EVERY_LATER = 4, 32
# The price of a row is that of one of so many.
_ROWS = 4
# A pass counts as at most so much slower or faster than the average, as a share of its time.
_MOST_SLOWER = 0.5
# How many passes with a change tell what a draft costs; until then it is taken to cost this share of a pass. A request that
# drafts bring nothing then asks seldom from the beginning, and so its passes show the cost.
_KNOWN, _ASSUMED = 8.0, 0.15
# So many requests at once are few.
_FEW = 4
# A text that began to repeat itself and brought nothing is a reason to ask so many times more seldom.
_LESS_OFTEN = 4
# A pass is quiet with this many drafts per request less than on average.
_SAME = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What time costs at the present load.

    Attributes:
        pass_s: seconds of a pass without drafts.
        row_s: seconds that one more row adds.
        requests: those that get a token of each pass.
    """

    pass_s: float
    row_s: float
    requests: int

    def gain_s(self, tokens: float, wait_s: float) -> float:
        """What a draft gains, in seconds of the batch: its accepted tokens, less their rows and the wait for it.

        Args:
            wait_s: until the drafts come, which those of all requests do together.
        """
        return tokens * max(0.0, self.pass_s / self.requests - self.row_s) - wait_s / self.requests


def prices_of(load: Load, budget: Budget) -> Prices | None:
    """The prices of a pass over ``load``, which holds no drafts; None where time does not count."""
    pass_s = budget.seconds(load)
    if math.isinf(pass_s):
        return None
    row_s = (budget.seconds(load.plus(_ROWS)) - pass_s) / _ROWS
    return Prices(pass_s=pass_s, row_s=row_s, requests=max(1, load.requests))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What another draft is expected to gain.

    Attributes:
        average_s: if it is like drafts on average, in seconds.
        like_last_s: if it is like the last one.
        passes: how many passes go by while it is made.
    """

    average_s: float
    like_last_s: float
    passes: int


def gain_of_drafts(worths: Iterable[tuple[Worth, float]], prices: Prices) -> float:
    """What a draft is expected to gain that is like those of several groups on average, in seconds.

    Args:
        worths: of each group, what its drafts brought, and seconds that one takes.
    """
    gains = ((prices.gain_s(worth.of(late=False), wait_s), prices.gain_s(worth.of(late=True), 0.0)) for worth, wait_s in worths)
    return max((max(each) for each in gains), default=0.0)


class AskCost:
    """How many seconds longer a pass takes for each draft that one origin makes meanwhile, over all requests."""

    def __init__(self) -> None:
        self._slope = CostSlope(_MOST_SLOWER, known=_KNOWN, assumed=_ASSUMED)
        self._since_quiet = 0
        self._begun = False

    def seconds(self, prices: Prices) -> float:
        """The estimate. Before a pass has told anything it is assumed, but for a few requests, which are to find out."""
        if self._begun:
            return self._slope.seconds
        return 0.0 if prices.requests <= _FEW else _ASSUMED * prices.pass_s

    @property
    def explores(self) -> bool:
        """Whether requests that gain little should not ask now, so that a pass without drafting can be measured."""
        every = _QUIET_EVERY_LATER if self._slope.known else _QUIET_EVERY
        # Drafts under way must end first. Others may go on asking, so it does not last for ever.
        return self._since_quiet % (every + MOST_STEPS) >= every

    def learn(self, *, requests: int, rows: int, drafts: int, seconds: float, expected_s: float) -> None:
        """Learn from a pass without prompts.

        Passes with trees are not compared with those without: what rows cost is an estimate as well, and trees come from
        drafts.

        Args:
            drafts: those under way meanwhile, or asked for just before.
            seconds: that it took.
            expected_s: seconds that a pass over its rows takes.
        """
        self._begun = True
        more = self._slope.learn(requests=requests, units=drafts, seconds=seconds - expected_s, pass_s=expected_s, rows=rows)
        self._since_quiet = 0 if not drafts or more < -_SAME else self._since_quiet + 1


def opening_pays(average_s: float, cost: AskCost, prices: Prices) -> bool:
    """Whether a request that begins should ask for a draft at once, which nothing says about the text yet.

    It should where drafts pay on average, and where one fruitless draft does not exceed the share that they may take.

    Args:
        average_s: what a draft gains on average, in seconds.
    """
    cost_s = cost.seconds(prices)
    return average_s >= cost_s or _steps_at_most_share(cost_s, prices) <= MOST_STEPS


class Pace:
    """Decides, step by step, when one request reports to one origin."""

    def __init__(self) -> None:
        self._steps = 0
        # A step is likely to ask if its turn is a multiple of the period.
        self._turn, self._period = 0, 1
        # The next fruitless draft is asked for after so many steps.
        self._every = MOST_STEPS
        self._wanted = True
        # Of the times that the text began to repeat itself since it was last asked for that, the one at which it is again.
        self._begun, self._next_try = 0, 1

    def due(
        self, gain: Gain, cost: AskCost, prices: Prices, *, turn: int, wanted: bool, free: bool, repeats: bool = False
    ) -> bool:
        """Whether to report now, and so to ask for a draft. Call once per step.

        Args:
            turn: counts steps. All requests make their fruitless drafts in the same ones, so that the others are quiet.
            wanted: whether the budget wants any nodes now.
            free: whether the origin may be asked: it is not behind with earlier drafts.
            repeats: whether the text begins to repeat itself, whatever drafts brought before.
        """
        self._steps += 1
        self._turn = turn
        wanted_before, self._wanted = self._wanted, wanted
        due = self._steps >= MOST_STEPS or self._due(gain, cost, prices, turn, free, repeats)
        # The budget seldom wants nodes where they do not pay; that moment must not be missed.
        due = due or (wanted and not wanted_before)
        if due:
            self._steps = 0
        return due

    def _due(self, gain: Gain, cost: AskCost, prices: Prices, turn: int, free: bool, repeats: bool) -> bool:
        cost_s = gain.passes * cost.seconds(prices)
        pays = self._wanted and gain.average_s >= cost_s
        if pays:
            self._every = 1
        # Those that gain more than drafting can cost need not know its cost.
        if cost.explores and gain.average_s < prices.pass_s / prices.requests:
            return False
        if pays or (self._wanted and gain.like_last_s >= cost_s):
            self._next_try = self._period = 1
            return True
        if repeats and self._wanted and free and self._tries():
            return True
        every = self._period = min(self._every, _steps_between(cost_s, prices))
        if turn % every or not (free or every == 1):
            return False
        self._every = min(MOST_STEPS, 2 * self._every)
        return True

    def _tries(self) -> bool:
        """Whether to ask because the text begins to repeat itself: more seldom the more often that brought nothing."""
        self._begun += 1
        if self._begun < self._next_try:
            return False
        self._begun, self._next_try = 0, min(MOST_STEPS, _LESS_OFTEN * self._next_try)
        return True

    @property
    def expects(self) -> bool:
        """Whether the coming step is likely to ask for a draft."""
        return (self._turn + 1) % self._period == 0

    def restart(self) -> None:
        """Note that the origin has been told everything."""
        self._steps = 0


def _steps_between(cost_s: float, prices: Prices) -> int:
    """Steps from one fruitless draft to the next, so that those of all requests take their share of time: a power of two."""
    every = _steps_at_most_share(cost_s, prices)
    # Rounded up, but for what is just above a power of two: the share is exceeded by a fifth at most.
    return 1 if every <= 1 else int(min(MOST_STEPS, 2 ** math.ceil(math.log2(every) - 0.25)))


def _steps_at_most_share(cost_s: float, prices: Prices) -> float:
    """In how many steps one fruitless draft of each request takes the share that they may take."""
    return cost_s * prices.requests / (_SHARE * prices.pass_s)
