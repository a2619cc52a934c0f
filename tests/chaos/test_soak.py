"""``outrider bench soak`` for a moment: nothing wrong, nothing leaked; and what is planted is reported."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from benchmarks.soak.doors import DOORS
from benchmarks.soak.report import write_report
from benchmarks.soak.run import STRATEGIES, SoakConfig, SoakRun
from benchmarks.soak.users import tenants
from tests.chaos import planted_component
from tests.chaos.in_processes import tiny
from tests.servers.component_forks import forked
from tests.servers.service import tiny_settings

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(420)]

# Room for some four whole requests, so that some step back and some are refused.
CRAMPED = tiny_settings("verifier.kv_cache_tokens=1024", "verifier.max_nodes=16", "verifier.max_waiting=2")


async def test_nothing_is_wrong_and_nothing_leaks(tiny_model: Path, tmp_path: Path) -> None:
    run = SoakRun(SoakConfig(minutes=0.5, every_s=1.5, logs=tmp_path), tiny(tiny_model), CRAMPED)
    await run.run()
    record, verdict = run.record, run.record.verdict()
    print(verdict.line, *verdict.leaks, sep="\n")
    assert verdict.good, (verdict.line, verdict.wrong, verdict.held, verdict.leaks, verdict.ended)
    assert {each.outcome for each in record.judged} == {"right", "left", "error"}
    for what, names in (("door", DOORS), ("tenant", [each.name for each in tenants()]), ("strategy", STRATEGIES)):
        counts = Counter(getattr(each, what) for each in record.judged if each.outcome == "right")
        assert set(counts) == set(names), what
    assert len({fault.component for fault in record.faults}) > 2
    assert {trend.process for trend in verdict.trends} >= {f"{role} 0" for role in run.replicas}
    assert len(verdict.files) == sum(run.replicas.values())
    assert "Traceback" not in "".join(log.read_text() for log in sorted(tmp_path.glob("router-*.log")))  # noqa: ASYNC240
    write_report(record, verdict, tmp_path)
    said = (tmp_path / "report.md").read_text()
    assert verdict.sentence in said and "none in anything else" in said
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"first_tokens.svg", "memory.svg", "files.svg"}


async def test_what_is_planted_is_reported(tiny_model: Path, tmp_path: Path) -> None:
    wanted = SoakConfig(
        minutes=0.4,
        every_s=0,
        redis=False,
        requests=6,
        logs=tmp_path,
        # Planted descriptors are never closed.
        settled_s=5,
        start_component=partial(forked, main=planted_component.main),
    )
    run = SoakRun(wanted, tiny(tiny_model), tiny_settings())
    await run.run()
    verdict = run.record.verdict()
    assert not verdict.good and verdict.line.startswith("NO: ")
    assert verdict.wrong and all("instead of" in line for line in verdict.wrong), verdict.wrong
    assert verdict.right
    assert {"verifier 0: memory", "verifier 1: memory"} <= {line.partition(" grows")[0] for line in verdict.leaks}
    assert any(line.startswith("router 0: ") and "descriptors" in line for line in verdict.leaks), verdict.leaks
