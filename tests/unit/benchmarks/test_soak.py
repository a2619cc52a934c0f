"""How a soak judges: answers against plain decoding, and what grows against what only varies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner

from benchmarks.soak.exchanges import LEFT, WHOLE, SoakExchange, judge
from benchmarks.soak.requests import SoakRequest
from benchmarks.soak.resources import CONFIDENCE, Usage, student, trends
from benchmarks.soak.run import SoakRun
from benchmarks.soak.users import shared_out, tenants
from benchmarks.soak.verdict import verdict_of
from cli.main import app

RIGHT = {"r": (1, 2, 3)}


def seen(tokens: tuple[int, ...], *ends: str) -> SoakExchange:
    request = SoakRequest(name="r", token_ids=(5,), options={})
    exchange = SoakExchange(request=request, tenant="t", door="gRPC stream", strategy="blend", streamed=True)
    for token in tokens:
        exchange.show([token])
    for end in ends:
        exchange.over(end, "why")
    return exchange


@pytest.mark.parametrize(
    ("tokens", "ends", "outcome"),
    [
        ((1, 2, 3), (WHOLE,), "right"),
        ((1, 2), (LEFT,), "left"),
        ((), (LEFT,), "left"),
        ((1, 2), ("Unavailable",), "error"),
        ((1, 2), (WHOLE,), "broken"),
        ((1, 4, 3), (WHOLE,), "broken"),
        ((1, 4), (LEFT,), "broken"),
        ((1, 1), ("Unavailable",), "broken"),
        ((1, 2, 3, 4), (WHOLE,), "broken"),
        ((1, 2, 3), (), "broken"),
        ((1, 2, 3), (WHOLE, "Unavailable"), "broken"),
        ((1, 2), ("InternalError",), "broken"),
        ((1, 2), ("no end",), "broken"),
        ((), ("Unauthenticated",), "broken"),
        ((1,), ("connection lost",), "error"),
    ],
)
def test_an_answer_is_right_or_ends_in_one_error(tokens: tuple[int, ...], ends: tuple[str, ...], outcome: str) -> None:
    judged = judge(seen(tokens, *ends), RIGHT)
    assert judged.outcome == outcome
    assert bool(judged.wrong) == (outcome == "broken")
    verdict = verdict_of([judged, judge(seen((1, 2, 3), WHOLE), RIGHT)], [], {}, [])
    assert verdict.good == (outcome != "broken")
    assert ("none in anything else" in verdict.sentence) == verdict.good


def used(grows: float, seed: int, count: int = 300) -> list[Usage]:
    """A process whose memory wanders about 300 MiB, and grows by so many MiB in all."""
    source, wandering, found = random.Random(seed), 0.0, []
    for at in range(count):
        wandering = 0.9 * wandering + source.gauss(0, 1)
        memory = 300 + wandering + grows * at / count
        found.append(Usage(at_s=float(at), process="verifier 0", life=1, memory=memory, files=20 + source.randrange(6)))
    return found


def test_growth_is_told_from_what_varies() -> None:
    flat = [trends(used(0.0, seed)) for seed in range(200)]
    assert all(len(several) == 2 for several in flat)
    assert not any(trend.leaks for several in flat for trend in several)
    # The interval holds the truth about as often as it says.
    assert sum(several[0].low <= 0 <= several[0].high for several in flat) >= 190
    grown = [trends(used(60.0, seed))[0] for seed in range(50)]
    assert all(trend.leaks for trend in grown)
    assert sum(trend.low <= 3600 * 60 / 300 <= trend.high for trend in grown) >= 47


def test_only_the_longest_life_of_a_process_counts() -> None:
    short = [Usage(at_s=each.at_s, process=each.process, life=2, memory=9.0, files=1) for each in used(0.0, 0, 40)]
    assert [trend.first > 100 for trend in trends([*used(0.0, 0), *short])] == [True, False]
    other = [Usage(at_s=each.at_s, process="verifier 1", life=1, memory=9.0, files=1) for each in short]
    assert {trend.process for trend in trends([*used(0.0, 0), *other])} == {"verifier 0"}


def test_descriptors_leak_where_they_stay() -> None:
    right = judge(seen((1, 2, 3), WHOLE), RIGHT)
    assert verdict_of([right], [], {}, [], {"router 0": (30, 33)}).good
    verdict = verdict_of([right], [], {}, [], {"router 0": (30, 60), "router 1": (30, 31)})
    assert not verdict.good and verdict.leaks == ("router 0: 60 descriptors after the last user, 30 before the first",)


def test_too_short_a_life_says_nothing() -> None:
    short = used(0.0, 0, 10)
    assert trends(short[:10]) == []


def test_the_quantile_is_students() -> None:
    for freedom in (5, 14, 60):
        assert student(CONFIDENCE, freedom) == pytest.approx(stats.t.ppf((1 + CONFIDENCE) / 2, freedom), rel=0.01)


def test_every_tenant_has_a_user() -> None:
    for count in (3, 12):
        assert {tenant.name for tenant in shared_out(tenants(), count)} == {tenant.name for tenant in tenants()}


@pytest.mark.parametrize(("held", "code"), [({}, 0), ({"drafter 0: drafter_sessions": 1.0}, 1)])
def test_the_command_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: dict[str, float], code: int
) -> None:
    async def run(self: SoakRun) -> None:
        self.record.judged.append(judge(seen((1, 2, 3), WHOLE), RIGHT))
        self.record.held = held

    monkeypatch.setattr(SoakRun, "run", run)
    done = CliRunner().invoke(app, ["bench", "soak", "--minutes", "0.1", "--out", str(tmp_path / "out")])
    assert done.exit_code == code, done.output
    assert "Of 1 answers under 0 faults, 1 were right" in done.output
    assert (tmp_path / "out" / "report.md").exists() and (tmp_path / "out" / "results.json").exists()
