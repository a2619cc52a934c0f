"""Decides how often an origin is asked for drafts: at every step where that pays (docs/decisions.md, "Ask"). Uses no clock.

A drafter on the target's own cores slows the passes down, whether or not its drafts are used. The cost of a draft is
measured: passes with drafting under way are compared with those without. If a request's drafts bring less than that, its
reports are held back and sent together. Wasted drafts then take a small share of all pass time. A text that begins to repeat
itself is asked for at once. If drafting slows no pass, it costs nothing, and every step is reported at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.verifier.engine.deciding.cost_slope import CostSlope
from services.verifier.engine.deciding.waiting import Worth
from speculation.budget import Budget
from speculation.costs import Load
from speculation.records import quickly_made

log = logging.getLogger(__name__)

# Share of all pass time that wasted drafts may take: less than what can be noticed.
_SHARE = 0.01
# The most steps that one report covers: a request notices after so many that its drafts have become good.
MOST_STEPS = 32
# One pass in so many goes without drafting, to compare with: before the cost is known, and afterwards.
_QUIET_EVERY, _QUIET_EVERY_LATER = 4, 32
# The price of a row is a quarter of that of four more: the cost of a single one is mostly noise.
_ROWS = 4
# A pass counts as at most so much slower or faster than the average, as a share of its time. One that was interrupted tells
# little.
_MOST_SLOWER = 0.5
# In passes that differ by one draft per request: how many make the cost known. Until then a draft is taken to cost this
# share of a pass. Requests with wasted drafts then ask seldom from the beginning, so their passes show the cost.
_KNOWN, _ASSUMED = 8.0, 0.15
# Up to so many requests at once, a first draft is free: somebody must find out what it costs.
_FEW = 4
# After a repetition that brought nothing, the next try waits for so many times as many repetitions.
_LESS_OFTEN = 4
# A pass is quiet if it has at least so many drafts per request less than the average.
_SAME = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What time costs at the present load.

    Attributes:
        pass_s: seconds of a pass without drafts.
        row_s: seconds that one more row adds.
        requests: how many get a token of each pass.
    """

    pass_s: float
    row_s: float
    requests: int

    def gain_s(self, tokens: float, wait_s: float) -> float:
        """What a draft gains, in seconds of the batch: its accepted tokens, less their rows and the wait for it.

        Args:
            wait_s: seconds until the drafts come. Those of all requests come together.
        """
        return tokens * max(0.0, self.pass_s / self.requests - self.row_s) - wait_s / self.requests


def prices_of(load: Load, budget: Budget) -> Prices | None:
    """The prices of a pass over ``load``, a load without drafts; None where time does not count."""
    pass_s = budget.seconds(load)
    if math.isinf(pass_s):
        return None
    row_s = (budget.seconds(load.plus(_ROWS)) - pass_s) / _ROWS
    return Prices(pass_s=pass_s, row_s=row_s, requests=max(1, load.requests))


def known_prices(load: Load, budget: Budget) -> Prices | None:
    """``prices_of``; None, too, if the budget fails: asking for too many drafts costs speed, and nothing else."""
    try:
        return prices_of(load, budget)
    except Exception:
        log.exception("computing the cost of drafts failed")
        return None


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What another draft is expected to gain.

    Attributes:
        average_s: in seconds, if it is like drafts on average.
        like_last_s: in seconds, if it is like the last one.
        passes: how many passes go by while it is made.
    """

    average_s: float
    like_last_s: float
    passes: int


def gain_of_drafts(worths: Iterable[tuple[Worth, float]], prices: Prices) -> float:
    """What an average draft of the best of several groups is expected to gain, in seconds.

    Args:
        worths: for each group, what its drafts brought, and the seconds that one takes.
    """
    gains = (
        max(prices.gain_s(worth.in_time.value, wait_s), prices.gain_s(worth.late.value, 0.0)) for worth, wait_s in worths
    )
    return max(gains, default=0.0)


class AskCost:
    """How many seconds longer a pass takes for each draft that one origin makes meanwhile. All requests share it."""

    def __init__(self) -> None:
        self._slope = CostSlope(_MOST_SLOWER, known=_KNOWN, assumed=_ASSUMED)
        self._since_quiet = 0
        self._begun = False

    def seconds(self, prices: Prices) -> float:
        """The estimate. Before the first pass a cost is assumed, except for a few requests: they are to find it out."""
        if self._begun:
            return self._slope.seconds
        return 0.0 if prices.requests <= _FEW else _ASSUMED * prices.pass_s

    @property
    def known_s(self) -> float:
        """The estimate without what is assumed: 0 until passes have shown it."""
        return self._slope.seconds if self._slope.known else 0.0

    @property
    def explores(self) -> bool:
        """Whether it is time to measure a pass without drafting. Requests that gain little then do not ask."""
        every = _QUIET_EVERY_LATER if self._slope.known else _QUIET_EVERY
        # Drafts under way must end first. Other requests may go on asking, so this has an end.
        return self._since_quiet % (every + MOST_STEPS) >= every

    def learn(self, *, requests: int, rows: int, drafts: int, seconds: float, expected_s: float) -> None:
        """Learn from a pass without prompts.

        Passes with trees are not compared with those without. Trees come from drafts, and the cost of their rows is an
        estimate as well.

        Args:
            drafts: drafts under way meanwhile, or asked for just before.
            seconds: time of the pass.
            expected_s: expected time of a pass over its rows.
        """
        self._begun = True
        more = self._slope.learn(requests=requests, units=drafts, seconds=seconds - expected_s, pass_s=expected_s, rows=rows)
        self._since_quiet = 0 if not drafts or more < -_SAME else self._since_quiet + 1


def opening_pays(average_s: float, cost: AskCost, prices: Prices) -> bool:
    """Whether a request that begins should ask for a draft at once. Nothing is known of its text yet.

    It should if drafts pay on average, or if one wasted draft does not exceed the share of wasted drafts.

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
        # Steps until the next draft while drafts are wasted.
        self._every = MOST_STEPS
        self._wanted = True
        # How often the text has begun to repeat itself since the last try, and how often it must before the next try.
        self._begun, self._next_try = 0, 1

    def due(
        self, gain: Gain, cost: AskCost, prices: Prices, *, turn: int, wanted: bool, free: bool, repeats: bool = False
    ) -> bool:
        """Whether to report now, and so to ask for a draft. Call once per step.

        Args:
            turn: number of the step. All requests waste their drafts in the same steps, so that the others are quiet.
            wanted: whether the budget wants any nodes now.
            free: whether the origin may be asked: it is not behind with earlier drafts.
            repeats: whether the text begins to repeat itself.
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
        # A request that gains more than drafting can cost need not know its cost.
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
        """Whether to ask because the text begins to repeat itself. Each try that brings nothing makes the next one rarer."""
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
    """Steps from one wasted draft to the next, a power of two, so that all of them take their share of time."""
    every = _steps_at_most_share(cost_s, prices)
    # Rounded up, except from just above a power of two. The share is exceeded by a fifth at most.
    return 1 if every <= 1 else int(min(MOST_STEPS, 2 ** math.ceil(math.log2(every) - 0.25)))


def _steps_at_most_share(cost_s: float, prices: Prices) -> float:
    """In how many steps one wasted draft of each request takes the share of wasted drafts."""
    return cost_s * prices.requests / (_SHARE * prices.pass_s)
