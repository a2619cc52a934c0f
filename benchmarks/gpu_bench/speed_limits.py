"""The verdicts: what the design must show on a GPU, judged by what the parts of the benchmark measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.bench.contestants import PLAIN
from benchmarks.gpu_bench.speed_parts import OURS
from benchmarks.gpu_check.verdicts import GateVerdict, GpuGate, Table

LEAST_SHARE, MOST_STAIR, MOST_PREMIUM, LEAST_GAIN = 0.7, 1.25, 1.15, 2.0
# Bytes of the weights of seven billion parameters in bfloat16, about; with fewer a pass costs less, drafting the same.
_SEVEN_BILLION = 13e9

Found = Mapping[str, GateVerdict]


class NotMeasured(Exception):
    """There is no figure for a limit; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """A figure beside its limit.

    Attributes:
        said: the figure, in one sentence.
        otherwise: what to do where it does not hold.
        void: why the limit does not apply to what was measured; empty: it does.
    """

    value: float
    limit: float
    holds: bool
    said: str
    otherwise: str
    void: str = ""
    table: Table | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limit:
    """One limit.

    Attributes:
        parts: whose figures ``judge`` takes, in this order.
        anywhere: it holds on CPUs, too.
    """

    name: str
    asks: str
    parts: tuple[str, ...]
    judge: Callable[..., _Judged]
    anywhere: bool = False


def verdicts_on(found: Found, *, on_gpu: bool) -> list[GpuGate]:
    """The verdicts on what the parts found, in their order."""
    return [GpuGate(name=one.name, asks=one.asks, run=partial(_verdict, one, found, on_gpu), seconds=0) for one in _LIMITS]


def _verdict(limit: _Limit, found: Found, on_gpu: bool) -> GateVerdict:
    try:
        judged = limit.judge(*(_figures(found, part) for part in limit.parts))
    except NotMeasured as reason:
        return GateVerdict(result="not measured", found="-", follows=str(reason))
    void = judged.void or ("" if on_gpu or limit.anywhere else "this verdict is for GPUs")
    return GateVerdict(
        result="not measured" if void else "pass" if judged.holds else "fail",
        found=judged.said,
        follows=void or ("as designed" if judged.holds else judged.otherwise),
        figures={"value": judged.value, "limit": judged.limit},
        table=judged.table or [],
    )


def _figures(found: Found, part: str) -> Mapping[str, Any]:
    if part not in found:
        raise NotMeasured(f"{part} was left out: run it, too")
    if found[part].result != "pass":
        raise NotMeasured(f"{part} has measured nothing: see its line")
    return found[part].figures


def _by_rows(figures: Mapping[str, Any], *wanted: str) -> list[float]:
    own = figures["milliseconds_by_rows"]
    if missing := [rows for rows in wanted if rows not in own]:
        raise NotMeasured(f"--rows lacks {' and '.join(missing)}")
    return [own[rows] for rows in wanted]


def _bandwidth(passes: Mapping[str, Any]) -> _Judged:
    (one,), floor = _by_rows(passes, "1"), passes["floor_milliseconds"]
    share = floor / one
    return _Judged(
        value=share, limit=LEAST_SHARE, holds=share >= LEAST_SHARE,
        said=f"plain decoding runs at {share:.0%} of it: {one:.2f} ms, reading takes {floor:.2f}",
        otherwise="profile one pass (nsys): gaps between kernels, or a product that reads slowly (make gpu-check, G2)",
    )  # fmt: skip


def _stair(passes: Mapping[str, Any]) -> _Judged:
    one, many = _by_rows(passes, "1", "64")
    return _Judged(
        value=many / one, limit=MOST_STAIR, holds=many / one <= MOST_STAIR,
        said=f"64 rows cost {many / one:.2f} times one: {many:.2f} and {one:.2f} ms",
        otherwise="trees gain less than they could: make gpu-check, G2 and G6, says whether products or attention are slow",
    )  # fmt: skip


def _premium(passes: Mapping[str, Any], fast: Mapping[str, Any]) -> _Judged:
    ours, theirs = passes["milliseconds_by_rows"], fast["milliseconds_by_rows"]
    premiums = {rows: ours[rows] / theirs[rows] for rows in ours}
    worst = max(premiums, key=lambda rows: premiums[rows])
    value = premiums[worst]
    return _Judged(
        value=value, limit=MOST_PREMIUM, holds=value <= MOST_PREMIUM,
        said=f"at worst {value:.2f} times the fast one, at {worst} rows: {ours[worst]:.2f} and {theirs[worst]:.2f} ms",
        otherwise="exact bits cost too much: the log of the start times the layers one by one; the rest is attention's",
        void="" if passes["exact"]
        else f"passes are not exact here (layers by {passes['linears']}): see make gpu-check, G2 to G5",
        table=[
            ["rows", "exact, ms", "fast, ms", "exact / fast"],
            *([rows, f"{ours[rows]:.2f}", f"{theirs[rows]:.2f}", f"{share:.2f}"] for rows, share in premiums.items()),
        ],
    )  # fmt: skip


def _gain(model: Mapping[str, Any], speed: Mapping[str, Any]) -> _Judged:
    small = model["bytes"] < _SEVEN_BILLION
    alone = {one["contestant"]: one["tokens_per_second"]["median"] for one in speed["summary"] if one["concurrency"] == 1}
    if not {OURS, PLAIN} <= alone.keys():
        raise NotMeasured("--concurrency lacks 1")
    gain = alone[OURS] / alone[PLAIN]
    return _Judged(
        value=gain, limit=LEAST_GAIN, holds=gain >= LEAST_GAIN,
        said=f"{OURS} makes {gain:.2f} times plain decoding's tokens, one request at a time: {alone[OURS]:.1f} and "
        f"{alone[PLAIN]:.1f} per second",
        otherwise="if V1 and V2 passed, look at what is between passes (the verifier's step times), and at tokens per pass",
        void=f"the model has {model['bytes'] / 1e9:.1f} GB of weights: leave --model out for one of 15 GB" if small else "",
    )  # fmt: skip


def _equal(speed: Mapping[str, Any]) -> _Judged:
    checks: Sequence[Mapping[str, Any]] = speed["lossless"]
    answers = sum(one["answers"] for one in checks)
    if not answers:
        raise NotMeasured("no answer was compared")
    differ = {one["contestant"]: one["answers"] - one["equal"] for one in checks if one["equal"] < one["answers"]}
    listed = ", ".join(f"{count} of {name}" for name, count in differ.items())
    return _Judged(
        value=sum(differ.values()), limit=0, holds=not differ,
        said=f"answers that differ from plain decoding's: {listed}; {answers} were compared" if differ
        else f"all {answers} answers are plain decoding's, token for token",
        otherwise="if B2 says that passes are exact, make gpu-check, G3 to G5, says what is not; else G2",
    )  # fmt: skip


_LIMITS = (
    _Limit(
        name="V1", asks=f"plain decoding: at least {LEAST_SHARE:.0%} of the bandwidth limit", parts=("B2",), judge=_bandwidth
    ),
    _Limit(name="V2", asks=f"64 rows: at most {MOST_STAIR} times the cost of one", parts=("B2",), judge=_stair),
    _Limit(name="V3", asks=f"exact passes: at most {MOST_PREMIUM} times the fast ones", parts=("B2", "B3"), judge=_premium),
    _Limit(
        name="V4", asks=f"{OURS}: at least {LEAST_GAIN:g} times plain at the cost of 7B", parts=("B1", "B4"), judge=_gain
    ),
    _Limit(name="V5", asks="every token equal in exact mode", parts=("B4",), judge=_equal, anywhere=True),
)
