"""How long a step waits for drafts: as long as that pays (architecture, law 3). No clock and no asyncio in here.

A step that goes now gives ``tokens`` in ``pass_s`` seconds. One that waits for a draft gives more, later, and everybody in
the batch waits with it. From how long drafts took before, the expected tokens and seconds of every deadline follow; the step
takes the deadline with the most tokens per second. That is the rule by which ``MeasuredBudget`` chooses nodes.

Estimates may be wrong, so an account bounds what they can cost: a wait is paid from it, what a wait has brought is paid in,
and so is a small share of all time. Where it is empty nobody waits. What lies in it pays for a trial now and then, so that
an origin that has become faster is noticed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

# So many of the latest drafts say how long the next one takes, and weight of the latest one in what drafts bring.
_REMEMBERED = 16
_WORTH_WEIGHT = 0.1
# After so many waits in a row to the end, for nothing, an origin is waited for only to try, until it says something.
_VAIN = 4
# What comes as late as the latest before may come a little later still: by so much, and so many times as late.
_LATER_S, _MARGIN = 0.0003, 1.1
# Share of all time that waits may take which bring nothing.
_SHARE = 0.015
# A trial after so many steps without a wait; every one in vain doubles that, up to so many.
_TRY_EVERY, _TRY_AT_LEAST_EVERY = 32, 2048


@dataclass(kw_only=True, slots=True)
class Worth:
    """How many tokens drafts get accepted: one that is there in time, and what is left of a late one."""

    in_time: float = 1.0
    late: float = 0.0

    def learn(self, tokens: float, *, late: bool) -> None:
        """Of a draft, so many tokens were what the target said."""
        if late:
            self.late += _WORTH_WEIGHT * (tokens - self.late)
        else:
            self.in_time += _WORTH_WEIGHT * (tokens - self.in_time)

    def of(self, *, late: bool) -> float:
        """Tokens of a draft."""
        return self.late if late else self.in_time

    def copy(self) -> Worth:
        """One that goes on learning apart."""
        return replace(self)


class Experience:
    """What is known of the drafts of one origin's group, over all requests.

    Args:
        first_guess_s: how long a draft takes, before any has come.
    """

    def __init__(self, first_guess_s: float) -> None:
        self.worth = Worth()
        self._guess = first_guess_s
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._vain = 0

    def came(self, seconds: float) -> None:
        """A draft has come, so long after the report that it answers, waited for or not."""
        self._took.append(seconds)

    def spoke(self) -> None:
        """The origin is there."""
        self._vain = 0

    def in_vain(self) -> None:
        """A step has waited as long as it would, and no draft came."""
        self._vain += 1
        self._took.append(math.inf)

    def left(self, age_s: float) -> list[float]:
        """How much longer a draft that was asked for so long ago may take: one guess for each that came, ascending.

        None where every one before had come by then, or where waits have been in vain too often.
        """
        if self._vain >= _VAIN:
            return []
        return sorted(took + _LATER_S - age_s for took in self._took or (self._guess,) if took + _LATER_S > age_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Drafts that come together: those of one origin's group for a step.

    Attributes:
        left: in how many seconds they come, as ``Experience.left`` gives it.
        tokens: what all of them are expected to get accepted, beyond what lies ready.
        seconds: how much longer the pass takes for their rows.
    """

    left: Sequence[float]
    tokens: float
    seconds: float = 0.0


def best_wait(missing: Sequence[Missing], tokens: float, pass_s: float, most_s: float) -> float:
    """The deadline, in seconds from now and at most ``most_s``, with the most expected tokens per second; 0: go now.

    Args:
        tokens: what the step gives if it goes now, all requests together.
        pass_s: how long its pass takes; infinite where time does not count: then the most tokens are wanted.
    """

    def rate(more: float, seconds: float) -> float:
        return more if math.isinf(pass_s) else (tokens + more) / (pass_s + seconds)

    events = sorted((at, index) for index, each in enumerate(missing) for at in each.left if at <= most_s)
    come = [0.0] * len(missing)
    gained, rows_s, waited_s, now = 0.0, 0.0, 0.0, 0.0
    best, best_rate = 0.0, rate(0.0, 0.0)
    for at, index in events:
        # Until all are there the step waits on; origins are independent of each other.
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
    """Says how long each step waits, and keeps the account.

    Args:
        most_s: longest that a step waits.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._account_s = 0.0
        self._steps_without = 0
        self._try_every = _TRY_EVERY
        self._trying = False

    def seconds(self, missing: Sequence[Missing], tokens: float, pass_s: float, *, delays_others: bool) -> float:
        """How long the coming step waits at most; asked once for every step.

        Args:
            missing: what has not come; from those that are silent nothing is expected, but a trial waits for them, too.
            tokens: what the step gives if it goes now.
            pass_s: how long its pass takes; infinite where time does not count.
            delays_others: somebody is in the batch for whom nobody drafts: nothing that others gain makes up for their wait.
                It has to come out of the account.
        """
        self._trying = False
        allowed = self._most_s
        if math.isfinite(pass_s):
            self._account_s = min(self._most_s, self._account_s + _SHARE * pass_s)
            if delays_others or self._account_s < 0:
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

    def waited(self, seconds: float, *, in_vain: bool) -> None:
        """The step has waited, and something came or nothing did."""
        self._account_s -= seconds
        if self._trying:
            self._try_every = min(_TRY_AT_LEAST_EVERY, 2 * self._try_every) if in_vain else _TRY_EVERY

    def gained(self, tokens: float, rate: float) -> None:
        """So many tokens were accepted only because a step had waited; ``rate`` is what the batch gives in a second."""
        self._account_s = min(self._most_s, self._account_s + tokens / rate)
