"""Plans for many GPUs: what is scaled grows with them, what exists once is said to be full first."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.bench.tables import markdown
from benchmarks.fleet.cost_tables import KNOWN
from benchmarks.fleet.plan import ComponentCosts, plan_fleet, plan_tables, read_component_costs
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

COSTS = ComponentCosts(
    router_request_s=0.01,
    router_piece_s=0.0005,
    drafter_draft_s=0.001,
    look_up_s=0.0001,
    redis_command_s=0.00005,
    controller_replica_s=0.002,
    controller_idle_s=0.05,
    gcs_replica_s=0.0001,
    gcs_idle_s=0.01,
    choice={8: {"choice_s": 0.0001, "ring_s": 0.001}, 64: {"choice_s": 0.0008, "ring_s": 0.008}},
    machine="planted",
)
H100 = KNOWN["24b-h100"]


def test_what_is_scaled_grows_with_the_gpus() -> None:
    plans = [plan_fleet(gpus, H100, COSTS) for gpus in (8, 64, 512)]
    for small, large in pairwise(plans):
        assert large.tokens_per_s == pytest.approx(8 * small.tokens_per_s)
        for name in ("routers", "drafters"):
            assert 6 * small.processes[name] <= large.processes[name] <= 14 * small.processes[name], name
        assert large.single["Serve's controller"] > small.single["Serve's controller"]
        assert large.choice_share > small.choice_share
    # More processes than streams over the policy's bound of 500 ask for.
    assert all(500 * plan.processes["routers"] >= plan.streams for plan in plans)
    replicas = plans[0].verifiers + sum(plans[0].processes.values())
    assert plans[0].single["Serve's controller"] == pytest.approx(0.05 + 0.002 * replicas)
    assert plans[2].bottleneck.startswith("Serve's controller")


def test_the_load_is_what_a_verifier_does_at_the_policys_limit() -> None:
    plan = plan_fleet(1, H100, COSTS)
    assert plan.streams / H100.max_num_seqs <= 0.4
    assert plan.tokens_per_s == pytest.approx(743 * plan.requests_per_s)
    # Longer prompts leave fewer requests, and no GPU is a plan.
    assert plan_fleet(1, H100, COSTS, prompt=6000).requests_per_s < plan.requests_per_s
    with refuses(ConfigurationError, field="--gpus", value=3):
        plan_fleet(3, KNOWN["70b-h100"], COSTS)


def test_what_another_table_says_changes_the_plan() -> None:
    slow = ComponentCosts(**{name: getattr(COSTS, name) for name in COSTS.__dataclass_fields__} | {"redis_command_s": 1.0})
    assert plan_fleet(64, H100, slow).bottleneck.startswith("Redis")
    tables = plan_tables([(plan_fleet(8, H100, COSTS), plan_fleet(9, H100, COSTS))], H100, 3.0)
    text = "\n".join(map(markdown, tables))
    assert "What 1 GPU more bring" in text
    assert "12.50%" in text


def test_the_measured_costs_can_be_read(tmp_path: Path) -> None:
    measured = read_component_costs()
    assert measured.machine
    assert 0 < measured.router_piece_s < measured.router_request_s < 1
    assert 0 < measured.drafter_draft_s < 0.1
    assert measured.of_choice("choice_s", 512) > measured.of_choice("choice_s", 8) > 0
    assert measured.of_choice("choice_s", 36) <= measured.of_choice("choice_s", 64)
    file = tmp_path / "none.json"
    for text in ("nonsense", json.dumps({"machine": {}}), "[]"):
        file.write_text(text)
        with refuses(ConfigurationError, field="none.json"):
            read_component_costs(file)
