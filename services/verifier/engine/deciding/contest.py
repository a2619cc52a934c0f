"""Decides for the whole load whether anybody drafts: plain decoding is held against drafting, by whole steps. Uses no clock.

Each decision about one draft (``asking``, ``waiting``, the budget) rests on estimates of what it costs. Some costs escape
them: threads that take a core for a moment, the interpreter's lock, likeliest ids that are read for drafters. So the sum is
measured as well. A quiet step is one in which nobody drafts, nobody is told anything and nothing is observed: plain decoding
as it would run without any drafter. Tokens per second of quiet steps are compared with those of all others at the same load.
Whichever is faster goes on. The other one is tried for a few steps now and then; an account bounds what these trials cost.
What is known can be kept, so that the next start need not find it out again.

Times are relative to what a plain step at the same load is expected to take. Requests, keys and the machine's speed are thus
out of the comparison. A step that also computes prompts is credited with the time that these are expected to take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from speculation.costs import slowdown
from speculation.estimators import DecayingMean, Ratio

# Requests times plain steps that a rate remembers: tokens of drafting vary from step to step, those of quiet steps do not.
# Times vary by step, however many requests it has: so many plain steps are remembered at least.
_MEMORY, _STEPS_REMEMBERED = {True: 512.0, False: 128.0}, 64.0
# Weight of a step in the noise of steps, and how many steps the assumption counts as that there is none.
_NOISE_WEIGHT, _NOISE_PRIOR = 0.01, 4.0
# A step differs from the others of its kind by at most so much.
_MOST_NOISE = 1.0
# Weight of a step in the share of steps with prompts.
_PROMPTS_WEIGHT = 0.02
# So much counts what is known of the nearest other load.
_PRIOR = 16.0
# A rate is known after so many requests times plain steps.
_KNOWN = 8.0
# By what share quiet must be faster to be chosen, and drafting; quiet is the promise. The standard error of the comparison
# is on quiet's side as well: where other work makes times uncertain, drafting must win by more, and goes on only if it does.
_MARGIN = {False: 0.0, True: 0.02}
# Up to so many requests, one text decides whether drafting pays. Each then asks when its own text repeats itself, so finds
# more than a comparison of the past. So quiet must be faster by the second number to be tried, drafting by nothing; a text
# that repeats itself ends quiet.
_FEW, _MARGIN_OF_FEW = 4, {False: 0.05, True: 0.0}
# Share of all time that trials may cost; what there is for them at first and the most that is saved up, in plain steps.
_SHARE, _SAVED, _MOST_SAVED = 0.005, 2.0, 8.0
# Steps of a trial that count, of drafting and of quiet.
_TRIAL = {True: 16, False: 6}
# Steps until the first drafts are there; and most steps until the last ones are, after which a step counts as quiet anyway.
_OPENING, _CLOSING = 3, 16
# Fewest steps between two trials. Those of ways that are nearly as fast cost little each, but at first all that is saved up:
# so each wasted trial doubles it, up to the second number.
_BETWEEN, _MOST_BETWEEN = 64, 256
# A trial is expected to cost at least this share of each of its steps.
_LEAST_LOSS = 0.02
# What an earlier start has found out counts as so many requests times plain steps: the texts may be others now.
_RECALLED = 32.0


# A load, and whether the step computes prompts as well.
_Kind = tuple[int, bool]
# That of a million requests.
_MOST_LOAD = 40


@dataclass(slots=True)
class _Rate:
    """Work done in the time of each plain step, by kind of step. Weighed by the requests that get tokens.

    Attributes:
        noise: mean square of what single steps differ from the estimate by, relative to it.
    """

    memory: float
    by_kind: dict[_Kind, Ratio] = field(default_factory=dict)
    noise: DecayingMean = field(default_factory=lambda: DecayingMean(0.0, newest=_NOISE_WEIGHT, prior=_NOISE_PRIOR))

    def learn(self, kind: _Kind, requests: int, work: float, steps: float) -> None:
        """Add a step: the work done for each request, and how many plain steps it took."""
        found = self.by_kind.setdefault(kind, Ratio())
        if self.known(kind):
            self.noise.add(min(_MOST_NOISE, (work / steps / self.of(kind) - 1.0) ** 2))
        found.fade(max(self.memory, _STEPS_REMEMBERED * requests), requests * steps)
        found.add(requests * work, requests * steps)

    def known(self, kind: _Kind) -> bool:
        return kind in self.by_kind and self.by_kind[kind].whole >= _KNOWN

    def of(self, kind: _Kind) -> float:
        """The estimate for a kind of step, shrunk towards that of the nearest known load; 1 if nothing is known."""
        load, prompts = kind
        others = [other for other in self.by_kind if other[1] == prompts and other != kind and self.known(other)]
        nearest = min(others, key=lambda other: abs(other[0] - load), default=None)
        assumed = 1.0 if nearest is None else self.by_kind[nearest].of()
        return self.by_kind[kind].of(assumed, _PRIOR) if kind in self.by_kind else assumed

    def overall(self, load: int, prompts: float) -> float:
        """The estimate for steps at a load, of whose time this share goes to steps with prompts."""
        return (1.0 - prompts) * self.of((load, False)) + prompts * self.of((load, True))

    def variance(self, load: int, requests: int) -> float:
        """Of the estimate for a load, relative to it: the noise of one step over the steps remembered."""
        kinds = (self.by_kind.get((load, prompts)) for prompts in (False, True))
        steps = sum(kind.whole for kind in kinds if kind is not None) / requests
        return self.noise.value / max(1.0, steps)


class Contest:
    """Whether the coming step drafts.

    >>> contest = Contest()
    >>> def step(tokens: float, seconds: float) -> bool:
    ...     contest.learn(requests=8, tokens=tokens, seconds=seconds, plain_s=0.010, busy=contest.drafting)
    ...     return contest.drafting
    >>> drafted = [step(8.8, 0.012) if contest.drafting else step(8.0, 0.010) for _ in range(1000)]
    >>> drafted[:16].count(True), drafted[-500:].count(True) < 25
    (3, True)

    Attributes:
        drafting: whether drafters may be asked, and drafts be checked.
    """

    def __init__(self) -> None:
        self.drafting = True
        self._rates = {way: _Rate(memory) for way, memory in _MEMORY.items()}
        # Share of steps with prompts.
        self._prompts = DecayingMean(0.0, newest=_PROMPTS_WEIGHT)
        # In plain steps.
        self._account = _SAVED
        # Steps of a trial that are left; 0: there is none.
        self._trial = 0
        self._tried = False
        # Fewest steps until the next one.
        self._between = _BETWEEN
        # Steps since the last change.
        self._since = 0

    @property
    def learnt(self) -> bool:
        """Whether there is anything to keep: steps of both ways."""
        return all(rate.by_kind for rate in self._rates.values())

    def gain(self, requests: int) -> float:
        """Work per second of drafting over that of plain decoding, as far as is known."""
        load, prompts = _load(requests), self._prompts.value
        return self._rates[True].overall(load, prompts) / self._rates[False].overall(load, prompts)

    def plain_share(self, requests: int, *, prompts: bool) -> float:
        """How many times its expected time a quiet step takes, from the end of one pass to the end of the next."""
        return 1.0 / self._rates[False].of((_load(requests), prompts))

    def learn_plain(self, *, requests: int, seconds: float, plain_s: float, prompt_s: float = 0.0) -> None:
        """Learn from a step for which nobody may draft: it is quiet, and costs no trial. Arguments as for ``learn``."""
        kind = _load(requests), prompt_s > 0
        steps = slowdown(seconds, plain_s + prompt_s) * (plain_s + prompt_s) / plain_s
        self._rates[False].learn(kind, requests, 1.0 + prompt_s / plain_s, steps)

    def learn(
        self,
        *,
        requests: int,
        tokens: float,
        seconds: float,
        plain_s: float,
        prompt_s: float = 0.0,
        busy: bool,
        repeats: bool = False,
    ) -> None:
        """Learn from a step, and decide about the next one.

        Args:
            requests: that are decoded; ``tokens``: how many they got.
            seconds: from the end of the pass before to the end of this one.
            plain_s: expected seconds of a pass over one row of each request; ``prompt_s``: of its prompts, beside these.
            busy: whether a drafter had work meanwhile.
            repeats: whether a text begins to repeat itself.
        """
        load, expected_s = _load(requests), plain_s + prompt_s
        steps, work = slowdown(seconds, expected_s) * expected_s / plain_s, tokens / requests + prompt_s / plain_s
        self._prompts.add(float(prompt_s > 0))
        self._account = min(_MOST_SAVED, self._account + _SHARE * steps)
        if self._trial:
            # What the step took, less what its work would have taken the other way.
            lost = steps - work / self._rates[not self.drafting].of((load, prompt_s > 0))
            self._account = min(_MOST_SAVED, self._account - lost)
        self._since += 1
        if self._settles(busy):
            return
        self._rates[self.drafting].learn((load, prompt_s > 0), requests, work, steps)
        self._trial = max(0, self._trial - 1)
        if not self._trial:
            self._decide(load, requests, repeats)

    def as_object(self) -> dict[str, Any]:
        """What is known of both ways, as plain numbers, for a file."""
        return {
            # A trial may be under way.
            "drafting": self.drafting != self._tried,
            "rates": [
                [int(way), *kind, ratio.part, ratio.whole]
                for way, rate in self._rates.items()
                for kind, ratio in rate.by_kind.items()
            ],
        }

    @classmethod
    def from_object(cls, content: Mapping[str, Any]) -> Self:
        """A contest that begins with what another one knew.

        Raises:
            ValueError, KeyError, TypeError: ``content`` is not what ``as_object`` gives.
        """
        contest = cls()
        contest.drafting = bool(content["drafting"])
        for way, load, prompts, part, whole in content["rates"]:
            if not (0 < part < math.inf and 0 < whole < math.inf and 0 <= load <= _MOST_LOAD):
                raise ValueError(f"no work or time at a load: {load}, {part}, {whole}")
            ratio = contest._rates[bool(way)].by_kind[int(load), bool(prompts)] = Ratio(part, whole)
            ratio.fade(_RECALLED)
        return contest

    def _settles(self, busy: bool) -> bool:
        if self.drafting:
            return self._since <= _OPENING
        return busy and self._since <= _CLOSING

    def _decide(self, load: int, requests: int, repeats: bool) -> None:
        prompts, few = self._prompts.value, requests <= _FEW
        here, there = (self._rates[way].overall(load, prompts) for way in (self.drafting, not self.drafting))
        margin = _MARGIN_OF_FEW if few else self._margin(load, requests)
        known = not self.drafting or bool(self._rates[False].by_kind)
        if self._tried:
            # A trial that was not better by the margin ends where it began.
            self._tried = False
            if here > (1.0 + margin[self.drafting]) * there:
                self._between = _BETWEEN
            else:
                self._between = min(2 * self._between, _MOST_BETWEEN)
                self._change(trial=0)
        elif known and there > (1.0 + margin[not self.drafting]) * here:
            self._change(trial=0)
        elif self.drafting and few and here > (1.0 - margin[False]) * there:
            return
        elif self._since >= self._between or not known or (few and repeats):
            steps = _TRIAL[not self.drafting]
            cost = max(_LEAST_LOSS, 1.0 - there / here) * (steps + _OPENING)
            enough = any(self._rates[self.drafting].known((load, kind)) for kind in (False, True))
            if enough and self._account >= min(cost, _MOST_SAVED):
                self._tried = True
                self._change(trial=steps)

    def _margin(self, load: int, requests: int) -> dict[bool, float]:
        """By what share quiet must be faster to be chosen, and drafting: with the standard error of their comparison."""
        doubt = math.sqrt(sum(rate.variance(load, requests) for rate in self._rates.values()))
        return {False: _MARGIN[False] - doubt, True: _MARGIN[True] + doubt}

    def _change(self, trial: int) -> None:
        self.drafting = not self.drafting
        self._trial, self._since = trial, 0


def _load(requests: int) -> int:
    """Loads that are alike: 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ..."""
    return round(2 * math.log2(requests) + 0.001)
