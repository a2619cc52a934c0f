"""Fleets on a simulated clock: every request ends once, the same seed gives the same day, Ray Serve's rules are kept."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.autoscaling_policy import _apply_default_params_and_merge_state
from ray.serve.config import AutoscalingConfig
from ray.serve.experimental import consistent_hash_router

from benchmarks.fleet import autoscale
from benchmarks.fleet.autoscale import AutoscaleConfig, ComparedFleets, asked_for, compare_fleets
from benchmarks.fleet.cost_tables import KNOWN, SHAPES, Hardware, hardware_of, roofline
from benchmarks.fleet.hash_ring import HashRing
from benchmarks.fleet.recorded_traffic import read_arrivals
from benchmarks.fleet.replica_model import Job, ReplicaModel
from benchmarks.fleet.report import write_fleet_report
from benchmarks.fleet.serve_scaling import Autoscaler, Delays
from benchmarks.fleet.simulation import FleetConfig, FleetSimulation
from benchmarks.fleet.step_pace import StepPace
from benchmarks.fleet.traffic import Arrival, TrafficConfig, draw
from cli import fleet_commands
from cluster.settings.placement import Autoscaling
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

# Half an hour in the busiest hours costs no second.
SHORT = TrafficConfig(per_s=2.5, days=1 / 24, bursts=48, burst_factor=3.0, burst_s=300)
BOUNDS = Autoscaling(min_replicas=2, max_replicas=5, downscale_delay_s=120)


def config(**changed: Any) -> AutoscaleConfig:
    given: dict[str, Any] = {
        "hardware": KNOWN["24b-h100"],
        "traffic": SHORT,
        "bounds": BOUNDS,
        "fixed": (4,),
        "fleet": FleetConfig(node_s=20, load_s=10, deaths=2, every_s=60),
    }
    return AutoscaleConfig(**given | changed)


@pytest.fixture(scope="module")
def compared() -> ComparedFleets:
    return compare_fleets(config())


def test_every_request_ends_once(compared: ComparedFleets) -> None:
    for found in compared.outcomes:
        assert found.finished + found.refused + found.lost == found.requests == compared.requests > 1000
        assert found.lost == 0
        assert found.tokens <= compared.answer_tokens
        assert (found.tokens == compared.answer_tokens) == (found.finished == found.requests)
    arrivals = draw(SHORT, 1)
    pace = StepPace(KNOWN["24b-h100"])
    simulation = FleetSimulation(arrivals, KNOWN["24b-h100"], pace, FleetConfig(deaths=6), replicas=2)
    simulation.run()
    ends = simulation.ends
    assert sorted([*ends.finished, *ends.refused, *ends.lost]) == list(range(len(arrivals)))
    assert ends.moved > 0
    for number in ends.finished:
        assert ends.first_s[number] > 0
        assert ends.took_s[number] >= 0


def test_the_same_seed_gives_the_same_day(compared: ComparedFleets) -> None:
    again = compare_fleets(config())
    assert again.as_object() == compared.as_object()
    assert compare_fleets(config(seed=2)).as_object() != compared.as_object()


def test_replicas_stay_within_the_bounds_and_follow_the_load(compared: ComparedFleets) -> None:
    followed, fixed = compared.outcomes
    # Two die, and are away until they are loaded again.
    assert all(moment.running <= BOUNDS.max_replicas for moment in followed.moments)
    assert all(BOUNDS.min_replicas <= moment.paid for moment in followed.moments)
    assert followed.most > followed.fewest
    assert fixed.most == 4
    assert fixed.gpu_hours > followed.gpu_hours > 0


@pytest.mark.exhaustive
def test_a_policy_that_never_scales_is_shown_to_be_worse(compared: ComparedFleets) -> None:
    never = compare_fleets(config(), policy=lambda context: (2.0, {})).outcomes[0]
    ours = compared.outcomes[0]
    assert never.most == 2
    assert never.late_share > 2 * ours.late_share
    assert never.first_p99_s > 2 * ours.first_p99_s
    # And one that always wants everything costs as much as the fixed fleet does, nearly.
    always = compare_fleets(config(), policy=lambda context: (99.0, {})).outcomes[0]
    assert always.most == 5
    assert always.gpu_hours > ours.gpu_hours


def test_what_costs_more_gpus_is_billed(compared: ComparedFleets) -> None:
    for found in compared.outcomes:
        paid_s = 60 * sum(moment.paid for moment in found.moments)
        # Moments are a minute apart.
        assert found.gpu_hours * 3600 == pytest.approx(paid_s, rel=0.1)
        assert found.cost == pytest.approx(3.0 * found.gpu_hours)
    assert compare_fleets(config(price=6.0)).outcomes[0].cost == pytest.approx(2 * compared.outcomes[0].cost)


def test_serves_rules_are_serves() -> None:
    """Random wishes through Ray Serve's own delays and through ours."""
    source = random.Random(3)
    settings = AutoscalingConfig(min_replicas=1, max_replicas=9, upscale_delay_s=10, downscale_delay_s=60)
    for _ in range(20):
        ours, target, now = Delays(10, 60), 2, 0.0
        state: dict[str, Any] = {}
        for _ in range(300):
            now += source.choice((0.5, 2, 7))
            running = max(0, target - source.choice((0, 0, 0, 1, 2)))
            wanted = source.choice((0.3, target + 0.0, target + 0.7, target + 3.0, target / 2, 1.0))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ray.serve.autoscaling_policy.time", SimpleNamespace(time=lambda now=now: now))
                context = SimpleNamespace(config=settings, current_num_replicas=running, target_num_replicas=target)
                theirs, state = _apply_default_params_and_merge_state(state, {}, wanted, context)
            assert ours.decide(wanted, running, target, now) == theirs
            target = min(9, max(1, theirs))


def test_the_ring_is_serves() -> None:
    router = object.__new__(consistent_hash_router.ConsistentHashRouter)
    router._num_virtual_nodes, router._num_fallback_replicas = 100, 64
    router._deployment_id = "verifier"
    names = [f"r{number}" for number in range(7)]
    router._rebuild_ring(frozenset(ReplicaName(name) for name in names))
    ring = HashRing(names)
    for number in range(200):
        place = f"place-{number}"
        assert [replica.unique_id for replica in router._lookup_ranked_replicas(place)] == ring.order(place)


class ReplicaName(str):
    @property
    def unique_id(self) -> str:
        return str(self)


def test_one_request_alone_takes_what_its_steps_take() -> None:
    hardware = KNOWN["8b-h100"]
    pace = StepPace(hardware, acceptance=())
    replica = ReplicaModel("a", pace, 4, hardware.kv_cache_tokens, 1, 0.0)
    replica.take(0.0, Job(0, 0, prompt=2048, answer=101))
    step = pace.steps[0]
    assert replica.next_s == pytest.approx(2 * (step.base_s + step.prompt_s), rel=1e-6)
    began, ended = replica.step(replica.next_s)
    assert began is not None
    assert ended is None
    ends_s, decoding = replica.next_s, pace.steps[1]
    began, ended = replica.step(ends_s)
    assert ended is not None
    assert replica.load == 0
    each = decoding.base_s + decoding.key_s * 2049
    assert ends_s == pytest.approx(2 * (step.base_s + step.prompt_s) + 100 * each, rel=1e-3)


def test_turns_of_a_conversation_find_their_cache_and_a_full_queue_refuses() -> None:
    pace = StepPace(KNOWN["24b-h100"])
    replica = ReplicaModel("a", pace, 1, 163_840, 1, 0.0)

    def first_token_s(job: Job, now: float) -> float:
        replica.take(now, job)
        began, _ = replica.step(replica.next_s)
        assert began is job
        came = replica._now
        while replica.load:
            replica.step(replica.next_s)
        return came - now

    new = first_token_s(Job(0, 7, 4000, 50), 0.0)
    assert first_token_s(Job(1, 7, 4060, 50), 100.0) < new / 10
    assert first_token_s(Job(2, 8, 4060, 50), 200.0) > new / 2
    # The slots, and one that waits.
    for number in range(len(pace.steps)):
        assert not replica.full
        replica.take(300.0, Job(3 + number, 99 + number, 100, 1000))
    assert replica.full


def test_what_a_verifier_reports_is_averaged_before_the_policy_sees_it() -> None:
    seen: list[Any] = []

    def policy(context: Any) -> tuple[float, dict[str, Any]]:
        seen.append(context)
        return 9.0, {}

    scaler = Autoscaler(Autoscaling(max_replicas=3, upscale_delay_s=4, look_back_period_s=10), policy)
    for now, rows in ((2.0, 0.0), (4.0, 0.6)):
        scaler.report(now, {"a": {"rows": rows}})
        assert scaler.target_now(now) == 1
    assert seen[-1].aggregated_metrics == {"rows": {"a": 0.3}}
    scaler.report(6.0, {"a": {"rows": 0.0}, "b": {"rows": 1.0}})
    # Wanted for four seconds; and never beyond the bounds.
    assert scaler.target_now(6.0) == 3
    assert seen[-1].aggregated_metrics["rows"]["b"] == 1.0


@pytest.mark.exhaustive
def test_traffic_has_the_shape_of_a_day() -> None:
    day = TrafficConfig(per_s=0.2, bursts=0)
    found = draw(day, 5)
    assert found == sorted(found)
    by_hour = [sum(int(arrival.at_s // 3600) == hour for arrival in found) for hour in range(24)]
    assert max(by_hour) > 3 * min(by_hour)
    assert by_hour.index(min(by_hour)) in (2, 3, 4, 5)
    beginnings = len({arrival.conversation for arrival in found})
    assert beginnings == pytest.approx(0.2 * 86_400, rel=0.05)
    assert len(found) / beginnings == pytest.approx(day.turns, rel=0.05)
    burst = draw(TrafficConfig(per_s=0.2, bursts=30, burst_factor=3.0), 5)
    assert len(burst) > 1.2 * len(found)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("nonsense", ("day.jsonl:1", None, "not a request")),
        ('{"at_s": 1}', ("day.jsonl:1", None, "not a request")),
        ("[]", ("day.jsonl:1", None, "not a request")),
        ('{"at_s": -1, "prompt_tokens": 3, "answer_tokens": 3}', ("at_s", "-1.0")),
        ('{"at_s": 1, "prompt_tokens": 0, "answer_tokens": 3}', ("prompt_tokens", 0)),
        ('{"at_s": 1, "prompt_tokens": 3, "answer_tokens": 2.5}', ("answer_tokens", "2.5")),
        ("", ("day.jsonl",)),
    ],
)
def test_recordings_that_are_none(tmp_path: Path, line: str, refusal: tuple[object, ...]) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text(line + "\n")
    with refuses(ConfigurationError, *refusal):
        read_arrivals(file)


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    entries = [{"at_s": 9 - n, "prompt_tokens": 10 + n, "answer_tokens": 5, "conversation": f"c{n % 2}"} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, [*entries, {"at_s": 60.0, "prompt_tokens": 7, "answer_tokens": 1}])))
    arrivals = read_arrivals(file)
    assert arrivals[0] == Arrival(6, 1, 13, 5)
    assert [arrival.conversation for arrival in arrivals] == [1, 0, 1, 0, 2]
    found = compare_fleets(config(recorded=file, fixed=(1,)))
    assert [each.finished for each in found.outcomes] == [5, 5]
    with refuses(ConfigurationError, field="none.jsonl"):
        read_arrivals(tmp_path / "none.jsonl")


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_a_trace_of_azures_kind_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    # Both kinds of times that the published files have; the second is a day and a half second after the first.
    rows = "2023-11-17 18:15:47.1805900,11,5\n2023-11-16T18:15:46.680590+00:00,10,4\n\n"
    file.write_text("\ufeff" + HEADER.replace("\n", ",Model\n") + rows.replace(",5", ",5,a").replace(",4", ",4,b"))
    assert read_arrivals(file) == [Arrival(0.0, 1, 10, 4), Arrival(86_400.5, 0, 11, 5)]
    found = compare_fleets(config(recorded=file, fixed=(1,), fleet=FleetConfig(node_s=20, load_s=10, deaths=0, every_s=60)))
    assert [each.finished for each in found.outcomes] == [2, 2]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", ("trace.csv:1", None, "no column TIMESTAMP, ContextTokens, GeneratedTokens")),
        ("TIMESTAMP,ContextTokens\n", ("trace.csv:1", None, "no column GeneratedTokens")),
        (HEADER, ("trace.csv",)),
        (
            HEADER + "2023-11-16 18:15:46,1,2\n2023-11-16,1\n",
            ("trace.csv:3", None, "2 fields where the first line has 3"),
        ),
        (HEADER + "yesterday,1,2\n", ("trace.csv:2", None, "Invalid isoformat string: 'yesterday'")),
        (HEADER + "\n2023-11-16 18:15:46,1.5,2\n", ("trace.csv:3", None, "'1.5'")),
        (HEADER + "2023-11-16 18:15:46,1,0\n", ("GeneratedTokens", 0)),
        (HEADER + '2023-11-16 18:15:46,"1,2\n', ("trace.csv:2", None, "unexpected end of data")),
    ],
)
def test_a_malformed_trace_is_refused(tmp_path: Path, text: str, refusal: tuple[object, ...]) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with refuses(ConfigurationError, *refusal):
        read_arrivals(file)


def test_a_trace_has_its_own_rate(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    with refuses(ConfigurationError, field="--rate", value="3.0"):
        fleet_commands.autoscale(trace=file, rate=3.0)


def decoded_per_s(hardware: Hardware, requests: int, context: int = 1500) -> float:
    """Tokens of all requests together, when nobody brings a prompt."""
    step = StepPace(hardware).steps[requests]
    return requests * step.tokens / (step.base_s + step.key_s * requests / hardware.gpus * context)


def test_cost_tables(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"about": {}, "measured": KNOWN["135m-cpu"].costs.as_object()}))
    assert hardware_of(str(file)).costs.as_object() == KNOWN["135m-cpu"].costs.as_object()
    with refuses(ConfigurationError, field="--costs", value="nowhere", allowed="one of 8b-h100"):
        hardware_of("nowhere")
    # What memory allows: 4.5 ms for the weights of an 8B model at the full 3.35 TB/s.
    assert 0.66 * KNOWN["8b-h100"].costs.of_rows(1) == pytest.approx(4.5e-3, rel=0.03)
    seconds = [roofline(SHAPES["70b"]).of_rows(rows) for rows in range(1, 3000, 50)]
    assert seconds == sorted(seconds)
    for hardware in KNOWN.values():
        assert hardware.source.startswith(("computed", "measured"))
        rates = [decoded_per_s(hardware, count) for count in (1, hardware.max_num_seqs)]
        assert 0 < rates[0] < rates[1]


def test_what_is_asked_for_at_which_load() -> None:
    found = asked_for(64, 4)
    assert [replicas for replicas, _, _ in found] == [1, 2, 3, 4]
    # With one fewer, those that are left would not want one more at once.
    for (_, more, _), (_, _, fewer) in pairwise(found):
        assert fewer < more


@pytest.mark.exhaustive
def test_the_report_says_it_all(compared: ComparedFleets, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_fleet_report(compared, tmp_path)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for words in ("autoscaled", "4 fixed", "not measured", "What the policy asks for", "dollars for all GPUs"):
        assert words in page
    assert "| autoscaled |" in text
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["replicas.svg", "trade.svg", "waiting.svg"]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["outcomes"][0]["name"] == autoscale.AUTOSCALED
    before = (tmp_path / "plots" / "replicas.svg").read_bytes()
    write_fleet_report(compared, tmp_path)
    assert (tmp_path / "plots" / "replicas.svg").read_bytes() == before
