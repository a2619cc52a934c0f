"""Decides how long a step waits for drafts: as long as that pays (docs/decisions.md, "Wait"). Uses no clock and no asyncio.

A step that begins now yields ``tokens`` in ``pass_s`` seconds. A step that waits for a draft yields more tokens later, and
delays the whole batch. The times of earlier drafts give the expected tokens and seconds of every deadline. The step takes
the deadline with the most tokens per second. ``MeasuredBudget`` chooses nodes by the same rule.

The estimates may be wrong, so an account bounds their cost. Each wait is debited. The time gained by waits is credited, and
so is a small share of all pass time. No step waits while the account is overdrawn. A full account pays for a trial now and
then, so a faster origin is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from speculation.estimators import DecayingMean, RecentTimes

# How many of the latest drafts predict the next one's time: enough for a median, and soon replaced if the origin changes.
_REMEMBERED = 16
# Least weight of the latest draft in its request's average, and how many of these drafts the other requests count as. Texts
# differ more than drafts of one text do.
_WORTH_WEIGHT, _WORTH_OF_OTHERS = 0.25, 0.5
# After so many wasted waits in a row, an origin is waited for only in trials, until it sends something.
_WASTED = 4
# Slack for drafts slower than all before: seconds added to each estimate, and a factor on the chosen wait.
_LATER_S, _MARGIN = 0.0003, 1.1
# Share of all pass time that wasted waits may take: less than what can be noticed.
_SHARE = 0.0075
# Steps without a wait before a trial. Each wasted trial doubles them, up to the second number.
_TRY_EVERY, _TRY_AT_LEAST_EVERY = 32, 2048


@dataclass(kw_only=True, slots=True)
class Worth:
    """How many tokens of a draft the target accepts, on average.

    A request begins with the averages of all requests, which soon count less than its own drafts.

    Attributes:
        in_time: of drafts that came before their pass began, in tokens.
        late: of the remainders of drafts that came late.
    """

    in_time: DecayingMean = field(default_factory=lambda: DecayingMean(1.0, _WORTH_WEIGHT, _WORTH_OF_OTHERS))
    late: DecayingMean = field(default_factory=lambda: DecayingMean(0.0, _WORTH_WEIGHT, _WORTH_OF_OTHERS))

    def learn(self, tokens: float, *, late: bool) -> None:
        """Include a draft of which the target confirmed ``tokens`` tokens."""
        (self.late if late else self.in_time).add(tokens)

    def of(self, *, late: bool) -> float:
        """The average for late drafts or for those in time."""
        return (self.late if late else self.in_time).value

    def copy(self) -> Worth:
        """What another request begins with."""
        return Worth(in_time=self.in_time.successor(), late=self.late.successor())


class Experience:
    """Statistics of one origin's draft group, over all requests.

    Args:
        first_guess_s: assumed seconds for a draft until the first one has arrived.

    Attributes:
        worth: how many tokens its drafts get accepted.
    """

    def __init__(self, first_guess_s: float) -> None:
        self.worth = Worth()
        self._guess = first_guess_s
        self._took = RecentTimes(_REMEMBERED)
        self._typical_s: float | None = first_guess_s
        self._wasted = 0

    def came(self, seconds: float) -> None:
        """Note that a draft arrived ``seconds`` after it was asked for. A step need not have waited for it."""
        self._took.add(seconds)
        self._typical_s = None

    def came_together(self, took: Sequence[float]) -> None:
        """As ``came`` of each."""
        if took:
            self._took.extend(took)
            self._typical_s = None

    def spoke(self) -> None:
        """Note that the origin has replied."""
        self._wasted = 0

    def wasted(self) -> None:
        """Note that a step waited until its deadline and no draft came."""
        self._wasted += 1
        self.came(math.inf)

    @property
    def silent(self) -> bool:
        """Whether the latest waits were all wasted, and the origin has not replied since."""
        return self._wasted >= _WASTED

    @property
    def typical_s(self) -> float:
        """Seconds that a draft takes; infinite if most waits are wasted."""
        # Many drafts come at once, and then it is asked for many times.
        if self._typical_s is None:
            self._typical_s = self._took.median
        return self._typical_s

    def left(self, age_s: float) -> list[float]:
        """Estimates of the seconds until a draft arrives, ascending. It was asked for ``age_s`` seconds ago.

        There is one for each earlier draft that took longer than ``age_s``, and none after too many wasted waits.
        """
        if self.silent:
            return []
        if not self._took:
            return [self._guess - age_s] if self._guess > age_s else []
        return sorted(took - age_s for took in self._took.longer_than(age_s, _LATER_S))


class Experiences:
    """Those of every origin's draft groups.

    Args:
        first_guess_s: as of ``Experience``.
    """

    def __init__(self, first_guess_s: float) -> None:
        self._guess = first_guess_s
        self._found: dict[tuple[str, str], Experience] = {}

    def __len__(self) -> int:
        return len(self._found)

    def known(self, origin: str, group: str) -> bool:
        """Whether anybody has asked for that of an origin's group."""
        return (origin, group) in self._found

    def of(self, origin: str, group: str) -> Experience:
        """That of an origin's group."""
        found = self._found.get((origin, group))
        if found is None:
            found = self._found[origin, group] = Experience(self._guess)
        return found

    def of_groups(self, origin: str) -> list[tuple[str, Experience]]:
        """Those of an origin's groups."""
        return [(group, each) for (name, group), each in self._found.items() if name == origin]


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The missing drafts of one origin's group for a step. They are expected to arrive together.

    Attributes:
        left: estimates of the seconds until they arrive, as from ``Experience.left``.
        tokens: accepted tokens expected of all of them, beyond those of the drafts at hand.
        seconds: how much longer the pass takes with their rows.
    """

    left: Sequence[float]
    tokens: float
    seconds: float = 0.0


def best_wait(missing: Sequence[Missing], tokens: float, pass_s: float, most_s: float) -> float:
    """The deadline, in seconds from now and at most ``most_s``, with the most expected tokens per second; 0: go now.

    Args:
        tokens: expected tokens of the step if it begins now, over all requests.
        pass_s: seconds that its pass takes. Infinite where time does not count: the deadline with the most tokens wins.
    """

    def rate(more: float, seconds: float) -> float:
        return more if math.isinf(pass_s) else (tokens + more) / (pass_s + seconds)

    events = sorted((at, index) for index, each in enumerate(missing) for at in each.left if at <= most_s)
    come = [0.0] * len(missing)
    gained, rows_s, waited_s, now = 0.0, 0.0, 0.0, 0.0
    best, best_rate = 0.0, rate(0.0, 0.0)
    for at, index in events:
        # The step waits until all have arrived; origins are taken to be independent.
        waited_s += (at - now) * (1.0 - math.prod(come))
        now = at
        share = 1.0 / len(missing[index].left)
        come[index] = min(1.0, come[index] + share)
        gained += share * missing[index].tokens
        rows_s += share * missing[index].seconds
        if (found := rate(gained, waited_s + rows_s)) > best_rate:
            best, best_rate = at, found
    return best


class Waiting:
    """Decides how long each step waits, and keeps the account.

    Args:
        most_s: longest wait of a step, in seconds.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._account_s = 0.0
        self._steps_without = 0
        self._try_every = _TRY_EVERY
        self._trying = False

    def pass_begins(self, pass_s: float) -> None:
        """Credit the account with a pass's share. ``seconds`` does so, too: call one of them once per step."""
        self._trying = False
        if math.isfinite(pass_s):
            self._account_s = min(self._most_s, self._account_s + _SHARE * pass_s)

    def seconds(self, missing: Sequence[Missing], tokens: float, pass_s: float, *, delays_others: bool) -> float:
        """The longest wait of the coming step, in seconds. Call once per step.

        Args:
            missing: drafts not here yet. Those of silent origins have no estimates, but a trial waits for them too.
            tokens: expected tokens of the step if it begins now.
            pass_s: seconds that its pass takes; infinite where time does not count.
            delays_others: the batch holds requests without drafts. They gain nothing from a wait, so it may take no more
                than the account holds.
        """
        allowed = self._most_s
        self.pass_begins(pass_s)
        if math.isfinite(pass_s) and (delays_others or self._account_s < 0):
            allowed = max(0.0, min(allowed, self._account_s))
        if not missing:
            return 0.0
        found = min(allowed, _MARGIN * best_wait(missing, tokens, pass_s, allowed))
        if found > 0:
            self._steps_without = 0
            return found
        self._steps_without += 1
        affordable = math.isinf(pass_s) or self._account_s >= self._most_s
        if self._steps_without < self._try_every or not affordable:
            return 0.0
        self._steps_without, self._trying = 0, True
        return self._most_s

    def waited(self, seconds: float, *, wasted: bool) -> None:
        """Debit a step's wait.

        Args:
            wasted: whether no draft came.
        """
        self._account_s -= seconds
        if self._trying:
            self._try_every = min(_TRY_AT_LEAST_EVERY, 2 * self._try_every) if wasted else _TRY_EVERY

    def gained(self, tokens: float, rate: float) -> None:
        """Credit the account with ``tokens`` accepted only because a step had waited.

        Args:
            rate: the batch's tokens per second without the wait.
        """
        self._account_s = min(self._most_s, self._account_s + tokens / rate)
