"""Judges recorded turns: is drafting slower than plain decoding anywhere, by more than two equal runs differ?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from benchmarks.never_slower.cells import PLAIN, GridCell, LoadTurn
from benchmarks.never_slower.kinds import CHANGING

LEAST = 0.98
LEAST_SECOND = 0.95
GOAL = 1.1
GOAL_AT_ONCE = 8
# A ratio that is less certain than this says nothing.
MOST_NOISE = 0.05
# Plain decoding's own slowest second, over its mean, of a load that counts as steady.
_STEADY = 0.5
_TENTHS = 10

FORMULAS = {
    "ratio": "request-seconds of plain decoding / those of a strategy for the same tokens; a request counts "
    "from when it was sent (the first ones, which all come at once, from their first token) to the last token that the "
    "strategy and both turns of plain decoding have of it; median of the repeats",
    "noise": "plain decoding is measured twice in a round, and d is the difference of the two over their mean; "
    "s = sqrt(mean of d^2 / 2) is how far one turn strays (at least the median of s over all cells of the topology); "
    "noise = 2 s sqrt(1.5 / repeats): twice the standard error of a mean of ratios",
    "slower": f"ratio + noise < {LEAST}; a noise above {MOST_NOISE} counts twice",
    "slowest second": "fewest tokens in one second, tenth by tenth, over plain decoding's mean second of the round; "
    "up to the first prompt that plain decoding never reached; lowest of the repeats, and beside it plain decoding's own",
    "slow second": f"a second below {LEAST_SECOND}, and below plain decoding's own slowest ones by more than these differ "
    "among themselves and than 2 s sqrt(1.5); not judged where kinds change, nor where plain decoding itself pauses",
    "unclear": f"a ratio below {LEAST} within its noise, or a noise above {MOST_NOISE}",
    "TTFT": "median time to first token of a strategy / plain decoding's",
    "goal": f"mean of all ratios at up to {GOAL_AT_ONCE} at once: at least {GOAL}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellVerdict:
    """One strategy in one cell.

    Attributes:
        ratio: of speeds, the median of ``ratios``, which are by repeat; nan: nothing was measured.
        plain_speed: tokens per second of plain decoding.
        slowest_second, plain_slowest_second: over plain decoding's mean; nan: turns are shorter than a second.
        second_bound: a second below it is slow; nan: seconds are not judged here.
        ttft_ratio: above 1 the strategy's first tokens come later.
        state: ``yes``, ``unclear: why``, ``NO: what`` or ``failed: why``.
    """

    cell: GridCell
    strategy: str
    ratio: float
    ratios: tuple[float, ...]
    noise: float
    plain_speed: float
    slowest_second: float
    plain_slowest_second: float
    second_bound: float
    ttft_ratio: float
    answers: int
    wrong: tuple[str, ...]
    state: str

    @property
    def bad(self) -> bool:
        """Whether the promise is broken here."""
        return self.state.startswith(("NO", "failed"))


@dataclass(frozen=True, kw_only=True, slots=True)
class NeverSlowerVerdict:
    """All cells, the worst first. ``means``: by strategy, of the cells that count for the goal; nan: there are none."""

    cells: tuple[CellVerdict, ...]
    means: dict[str, float]

    @property
    def word(self) -> str:
        """``yes``, ``no``, or ``unclear``: nothing was measured, or a cell may be slower."""
        if any(cell.bad for cell in self.cells):
            return "no"
        return "yes" if self.cells and all(cell.state == "yes" for cell in self.cells) else "unclear"


def judge(turns: Iterable[LoadTurn], *, exact: bool = True) -> NeverSlowerVerdict:
    """The verdict on whole rounds. Where ``exact`` is False, equal tokens are not promised, and wrong ones break nothing."""
    by_cell: dict[GridCell, dict[int, list[LoadTurn]]] = {}
    for turn in turns:
        by_cell.setdefault(turn.cell, {}).setdefault(turn.repeat, []).append(turn)
    rounds = {cell: list(repeats.values()) for cell, repeats in by_cell.items()}
    strays = {cell: plain_stray(several) for cell, several in rounds.items()}
    cells = []
    for cell, several in rounds.items():
        known = [stray for other, stray in strays.items() if other.on == cell.on and not math.isnan(stray)]
        stray = max([strays[cell], statistics.median(known)]) if known else math.nan
        for strategy in dict.fromkeys(turn.strategy for turns in several for turn in turns if turn.strategy != PLAIN):
            cells.append(_judge_cell(cell, strategy, several, stray, exact))
    return NeverSlowerVerdict(cells=tuple(sorted(cells, key=_worst_first)), means=_means(cells))


def plain_stray(rounds: Sequence[Sequence[LoadTurn]]) -> float:
    """Standard deviation of one turn's speed over its mean, from plain decoding's equal turns; nan: there are none."""
    squares = []
    for turns in rounds:
        pairs = [(turn.work_s, turn.plain_work_s) for turn in turns if turn.strategy == PLAIN and not turn.error]
        if len(pairs) == 2 and any(pairs[0]):
            # Of the two turns, the first one's record holds both times.
            squares.append(2 * ((pairs[0][0] - pairs[0][1]) / sum(pairs[0])) ** 2)
    return math.sqrt(statistics.fmean(squares)) if squares else math.nan


def slowest_second(turn: LoadTurn) -> float:
    """Fewest tokens in any second that begins with a tenth; nan: what is shared with plain is shorter."""
    if turn.shared < _TENTHS:
        return math.nan
    sums = [0, *accumulate(turn.tenths[: turn.shared])]
    return float(min(later - earlier for earlier, later in zip(sums, sums[_TENTHS:], strict=False)))


def _judge_cell(
    cell: GridCell, strategy: str, rounds: Sequence[Sequence[LoadTurn]], stray: float, exact: bool
) -> CellVerdict:
    own = [turn for turns in rounds for turn in turns if turn.strategy == strategy]
    plain = [turn for turns in rounds for turn in turns if turn.strategy == PLAIN]
    ratios = tuple(_by_round(rounds, strategy, _ratio))
    seconds = _by_round(rounds, strategy, _second)
    plain_seconds = _by_round(rounds, PLAIN, _second)
    noise = 2 * stray * math.sqrt(1.5 / len(ratios)) if ratios else math.nan
    plain_ttft = statistics.fmean([turn.ttft_s for turn in plain] or [0.0])
    # A wrong token of plain decoding's own, in its second turn, is a wrong token of the cell.
    wrong = tuple(said for turn in (*own, *plain) for said in turn.wrong)
    errors = [turn.error for turn in (*own, *plain) if turn.error]
    verdict = CellVerdict(
        cell=cell,
        strategy=strategy,
        ratio=statistics.median(ratios) if ratios else math.nan,
        ratios=ratios,
        noise=noise,
        plain_speed=statistics.fmean([turn.speed for turn in plain] or [math.nan]),
        slowest_second=min(seconds, default=math.nan),
        plain_slowest_second=min(plain_seconds, default=math.nan),
        second_bound=_second_bound(cell, plain_seconds, noise * math.sqrt(len(ratios))),
        ttft_ratio=statistics.fmean([turn.ttft_s for turn in own]) / plain_ttft if own and plain_ttft else math.nan,
        answers=sum(turn.answers for turn in own),
        wrong=wrong,
        state="",
    )
    return replace(verdict, state=_state(verdict, errors, exact))


def _by_round(
    rounds: Sequence[Sequence[LoadTurn]], strategy: str, measure: Callable[[LoadTurn, float], float]
) -> list[float]:
    """``measure`` of every turn of the strategy, given the turn and plain decoding's mean speed in the same round."""
    values = []
    for turns in rounds:
        speeds = [turn.speed for turn in turns if turn.strategy == PLAIN and not turn.error]
        if not any(speeds):
            continue
        mean = statistics.fmean(speeds)
        values += [measure(turn, mean) for turn in turns if turn.strategy == strategy and not turn.error]
    return [value for value in values if not math.isnan(value)]


def _ratio(turn: LoadTurn, plain_speed: float) -> float:
    # A strategy that has none of plain decoding's tokens has no time for them either.
    return turn.plain_work_s / turn.work_s if turn.work_s and turn.plain_work_s else turn.speed / plain_speed


def _second(turn: LoadTurn, plain_speed: float) -> float:
    return slowest_second(turn) / plain_speed


def _second_bound(cell: GridCell, plain_seconds: Sequence[float], noise: float) -> float:
    """``noise``: of one round's ratio, since one second of one turn is judged."""
    if cell.kind == CHANGING or len(plain_seconds) < 2 or statistics.median(plain_seconds) < _STEADY:
        return math.nan
    # Nan where there is no noise to judge by.
    return min(LEAST_SECOND, min(plain_seconds)) - max(noise, max(plain_seconds) - min(plain_seconds))


def _state(verdict: CellVerdict, errors: Sequence[str], exact: bool) -> str:
    if errors:
        return f"failed: {errors[0]}"
    if verdict.wrong and exact:
        return "NO: wrong token"
    if math.isnan(verdict.ratio):
        return "unclear: no token of plain decoding came in time"
    if verdict.ratio + _needed(verdict.noise) < LEAST:
        return "NO: slower"
    # Comparisons with nan are False: seconds that are not judged are not slow.
    if verdict.slowest_second < verdict.second_bound:
        return "NO: slow second"
    if math.isnan(verdict.noise) or verdict.noise > MOST_NOISE:
        return "unclear: noise"
    return "yes" if verdict.ratio >= LEAST else "unclear: within noise"


def _needed(noise: float) -> float:
    """How far below the limit a ratio must lie. A large noise is itself known from few turns only, and counts twice."""
    return noise if noise <= MOST_NOISE else 2 * noise


def _worst_first(verdict: CellVerdict) -> tuple[int, float]:
    severity = ("failed", "NO: wrong token", "NO: slower", "NO", "unclear", "yes")
    place = next(place for place, start in enumerate(severity) if verdict.state.startswith(start))
    return place, math.inf if math.isnan(verdict.ratio) else verdict.ratio


def _means(cells: Iterable[CellVerdict]) -> dict[str, float]:
    counted: dict[str, list[float]] = {}
    for cell in cells:
        own = counted.setdefault(cell.strategy, [])
        if cell.cell.at_once <= GOAL_AT_ONCE and not math.isnan(cell.ratio):
            own.append(cell.ratio)
    return {strategy: statistics.fmean(own) if own else math.nan for strategy, own in counted.items()}
