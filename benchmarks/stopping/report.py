"""What a comparison of stopping policies says: passes, wasted drafts, lengths, F1, times, and the same by a cost model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.bench.measures import Spread
from benchmarks.bench.tables import Table, number, ratio
from benchmarks.stopping.run import ORACLE, PLAIN, ChainRun, ChainStep, Comparison

# Columns of the histograms: lengths from ... to.
_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 20), (21, None))
_NOTE = (
    "one request at a time; draft passes = drafted tokens; F1: drafting on behind a token says that it will be accepted, "
    "ending says that it will not; AUC: of the number that the policy compares with its threshold; by c: answer tokens / "
    "(target passes + c * draft passes)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySummary:
    """One policy over all requests and repeats.

    Attributes:
        tokens: of the answers without their first ones, which come with the prompt.
        seconds: by repeat.
        length, deviation: mean and standard deviation of drafts, in tokens.
        draft_s, target_s: mean of a pass; a request's first draft, which reads the prompt, is left out.
        shorter, longer: share of the drafts that are shorter or longer than the oracle's at the same place.
    """

    name: str
    tokens: int
    seconds: tuple[float, ...]
    target_passes: int
    draft_passes: int
    wasted: int
    length: float
    deviation: float
    f1: float
    auc: float
    draft_s: float
    target_s: float
    shorter: float
    longer: float
    histogram: tuple[int, ...]

    def speed_by(self, c: float) -> float:
        """Tokens per pass of the target, if a pass of the draft model costs ``c`` of them: the speed-up over plain."""
        return self.tokens / (self.target_passes + c * self.draft_passes)


def summaries(found: Comparison) -> list[PolicySummary]:
    """One summary per contestant, in the order of their first runs; plain decoding first, the oracle last."""
    by_name: dict[str, list[ChainRun]] = {}
    for run in found.runs:
        by_name.setdefault(run.contestant, []).append(run)
    names = [PLAIN, *(name for name in by_name if name not in (PLAIN, ORACLE)), ORACLE]
    return [_summary(name, by_name[name], found.oracle) for name in names if name in by_name]


def cost_of_a_draft(several: Sequence[PolicySummary]) -> float:
    """c: seconds of a draft pass / seconds of a pass of plain decoding, as measured in this run."""
    plain = next(each.target_s for each in several if each.name == PLAIN)
    passes = sum(each.draft_passes for each in several)
    return sum(each.draft_s * each.draft_passes for each in several if each.draft_passes) / passes / plain if passes else 0.0


def policy_table(several: Sequence[PolicySummary], title: str) -> Table:
    """The comparison; c stands in the title."""
    plain, c = several[0], cost_of_a_draft(several)
    rows = []
    for each in several:
        speed = [(each.tokens / len(each.seconds)) / seconds for seconds in each.seconds]
        ratios = [base / own for base, own in zip(plain.seconds, each.seconds, strict=True)]
        rows.append(
            (
                each.name,
                number(statistics.median(speed)),
                ratio(Spread(tuple(ratios)).as_object()),
                f"{each.speed_by(c):.2f}x",
                str(each.target_passes),
                str(each.draft_passes),
                str(each.wasted),
                f"{each.length:.1f} ± {each.deviation:.1f}",
                # The oracle ends before the wrong token, so it says nothing about any token.
                "–" if each.name == ORACLE else number(100 * each.f1, ".0f"),
                number(100 * each.auc, ".0f"),
                number(1e3 * each.draft_s if each.draft_passes else None, ".2f"),
                number(1e3 * each.target_s, ".2f"),
            )
        )
    columns = (
        "policy", "tok/s", "over plain", "by c", "target passes", "draft passes", "wasted drafts", "length", "F1 %", "AUC %",
        "ms/draft pass", "ms/target pass",
    )  # fmt: skip
    return Table(title=f"{title} (c = {c:.3f})", columns=columns, rows=tuple(rows), note=_NOTE)


def length_table(several: Sequence[PolicySummary]) -> Table:
    """Shares of the lengths of drafts, against the oracle's."""
    labels = [f"{low}" if low == high else f"{low}-{high}" if high is not None else f"{low}+" for low, high in _BUCKETS]
    rows = []
    for each in several[1:]:
        counts = each.histogram
        shares = [sum(counts[low : None if high is None else high + 1]) for low, high in _BUCKETS]
        compared = (each.shorter, max(0.0, 1 - each.shorter - each.longer), each.longer)
        rows.append(
            (
                each.name,
                *(f"{100 * share / max(1, sum(counts)):.0f}" for share in shares),
                *(f"{100 * value:.0f}" for value in compared),
            )
        )
    return Table(
        title="Lengths of drafts, % of the steps",
        columns=("policy", *labels, "below the oracle's", "equal", "above"),
        rows=tuple(rows),
        note="the oracle's length at the same place of the answer: how many tokens would have been accepted",
    )


def comparison_object(found: Comparison, several: Sequence[PolicySummary]) -> dict[str, Any]:
    """Everything as JSON, without text."""
    return {
        "c": cost_of_a_draft(several),
        "lossless": not found.changed,
        "policies": [asdict(each) for each in several],
        "runs": [
            {
                "policy": run.contestant,
                "request": run.request,
                "task": run.task,
                "repeat": run.repeat,
                "tokens": len(run.tokens),
                "seconds": run.seconds,
                "steps": [asdict(step) for step in run.steps],
            }
            for run in found.runs
        ],
        "oracle": {request: sorted(lengths.items()) for request, lengths in found.oracle.items()},
    }


def f1_of(steps: Sequence[ChainStep]) -> float:
    """F1 of "the token will be accepted", said by drafting on behind it, over all tokens that the target judged.

    The last token of a draft counts as said to be rejected, unless the draft was cut. So drafts of one token say of none
    that it will be accepted, and have an F1 of 0 where one was. nan where no token was accepted, nor said to be.
    """
    right = wrong = missed = 0
    for step in steps:
        for index in range(min(step.drafted, step.accepted + 1)):
            last = index == step.drafted - 1
            if last and step.cut:
                continue
            right += not last and index < step.accepted
            wrong += not last and index >= step.accepted
            missed += last and index < step.accepted
    told = 2 * right + wrong + missed
    return 2 * right / told if told else float("nan")


def area_under_roc(steps: Sequence[ChainStep]) -> float:
    """How well scores tell judged tokens apart: the probability that an accepted one's is higher than a rejected one's."""
    judged = [(score, at < step.accepted) for step in steps for at, score in enumerate(step.scores) if at <= step.accepted]
    scores = np.array([score for score, _ in judged])
    matched = np.array([ok for _, ok in judged], dtype=bool)
    good, bad = np.sort(scores[matched]), scores[~matched]
    if not (len(good) and len(bad)):
        return float("nan")
    below, up_to = np.searchsorted(good, bad, "left"), np.searchsorted(good, bad, "right")
    return float(1 - (below + up_to).sum() / (2 * len(good) * len(bad)))


def _summary(name: str, runs: Sequence[ChainRun], oracle: Mapping[str, Mapping[int, int]]) -> PolicySummary:
    steps = [step for run in runs for step in run.steps]
    later = [step for run in runs for step in run.steps[1:]]
    lengths = [step.drafted for step in steps]
    drafted = sum(step.drafted for step in later)
    repeats = range(1 + max(run.repeat for run in runs))
    places = [(run, step) for run in runs for step in run.steps if step.position in oracle.get(run.request, {})]
    below = sum(step.drafted < oracle[run.request][step.position] and not step.cut for run, step in places)
    above = sum(step.drafted > oracle[run.request][step.position] for run, step in places)
    return PolicySummary(
        name=name,
        tokens=sum(len(run.tokens) - 1 for run in runs),
        seconds=tuple(sum(run.seconds for run in runs if run.repeat == repeat) for repeat in repeats),
        target_passes=len(steps),
        draft_passes=sum(lengths),
        wasted=sum(step.drafted - step.accepted for step in steps),
        length=statistics.fmean(lengths) if lengths else 0.0,
        deviation=statistics.pstdev(lengths) if lengths else 0.0,
        f1=f1_of(steps) if any(lengths) else float("nan"),
        auc=area_under_roc(steps),
        draft_s=sum(step.draft_s for step in later) / drafted if drafted else 0.0,
        target_s=statistics.fmean(step.target_s for step in steps) if steps else 0.0,
        shorter=below / max(1, len(places)),
        longer=above / max(1, len(places)),
        histogram=tuple(np.bincount(lengths).tolist()) if lengths else (),
    )
