"""The benchmark must show what is broken: a drafter that is always wrong, and an acceptance rule that takes anything.

Everything is real but the speed where speed is compared: there the benchmark's clock goes on by what a pass with its rows
costs on a slow machine, and hardly by anything else, so that no machine decides.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.bench.contestants import PEERS, PLAIN, WorkerContestant
from benchmarks.bench.measure import Schedule
from benchmarks.bench.records import Prompt
from benchmarks.bench.run import Bench, BenchConfig
from benchmarks.bench.tables import all_tables
from benchmarks.peers import peer_hf, peer_outrider
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.drafter.sources.prompt_lookup import PromptLookupSession
from services.verifier.engine import verify
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target_port import Rows
from speculation import acceptance
from speculation.acceptance import Accepted, StopRule
from speculation.tree import chain
from speculation.types import TokenTree
from tests.running.patience import wait_for_every_draft
from tests.servers.service import tiny_settings

# One process, for the run that they share.
pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("bench catches")]

SECONDS_PER_PASS = 0.010
SECONDS_PER_ROW = 0.003


class DirectEngine:
    """A peer in this process, behind the same JSON as in its own."""

    def __init__(self, peer: Any) -> None:
        self.versions: dict[str, str] = {}
        self.peak_memory_bytes = 0
        self._peer = peer

    def order(self, order: dict[str, Any], requests: int = 1) -> Any:
        order = json.loads(json.dumps(order))
        if order["do"] == "logits":
            return self._peer.logits(order["tokens"], order["ids"])
        return json.loads(json.dumps(self._peer.run(order["contestant"], order["load"])))


class DirectLineup:
    """A ``Lineup`` without processes: Outrider and transformers on the tiny model."""

    def __init__(self, folder: Path) -> None:
        self.settings = load(flags=tiny_settings(), environ={})
        spec = {
            "settings": self.settings.model_dump(mode="json"),
            "model": "tiny",
            "model_path": str(folder),
            "threads": 1,
            "dtype": "float32",
            "device": "cpu",
        }
        self._outrider = peer_outrider.Peer(spec)
        self._engines = {"outrider": DirectEngine(self._outrider), "hf": DirectEngine(peer_hf.Peer(spec))}
        self.strategies = (PLAIN, "prompt_lookup")
        self.peers = ("hf", "hf_prompt_lookup")
        self.missing = {"vllm": "not installed"}
        self.threads = 1
        self.on_ray = False
        self.max_model_len = 512
        self.contestants = [
            WorkerContestant(name=name, engine=self.engine_of(name), most_at_once=PEERS[name].most_at_once if name in PEERS else None)
            for name in (*self.strategies, *self.peers)
        ]  # fmt: skip

    def load(self, telling: Callable[[str], AbstractContextManager[None]]) -> None:
        pass

    def engine_of(self, name: str) -> Any:
        return self._engines["hf" if name in PEERS else "outrider"]

    def transformers(self) -> Any:
        return self._engines["hf"]

    def close(self) -> None:
        self._outrider.close()


@contextmanager
def lined_up(folder: Path) -> Iterator[DirectLineup]:
    found = DirectLineup(folder)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def lineup(tiny_model: Path) -> Iterator[DirectLineup]:
    with lined_up(tiny_model) as found:
        yield found


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock, passes_s = ModelSlice.run, time.perf_counter, 0.0

    def slow(self: ModelSlice, batch: Sequence[Rows], *entering: torch.Tensor | None, **named: Any) -> torch.Tensor:
        nonlocal passes_s
        rows = sum(len(rows.tokens) for rows in batch if rows.context)
        passes_s += SECONDS_PER_PASS + SECONDS_PER_ROW * rows
        return run(self, batch, *entering, **named)

    monkeypatch.setattr(ModelSlice, "run", slow)
    wait_for_every_draft(monkeypatch)
    # What is real only keeps times apart.
    monkeypatch.setattr(time, "perf_counter", lambda: passes_s + clock() / 1000)


def run(lineup: DirectLineup, folder: Path, temperature: float = 0.0) -> Bench:
    prompts = tuple(
        Prompt(
            id=str(i), task=task, turns=("the quick brown fox, the quick brown fox, the quick", "and before that")[: i + 1]
        )
        for task in ("copy", "talk")
        for i in range(2)
    )
    schedule = Schedule(concurrency=(1, 3), repeats=2, max_tokens=24, temperature=temperature)
    config = BenchConfig(source="planted", prompts=prompts, schedule=schedule, seed=3)
    model = ResolvedModel(name="tiny", path=folder)
    bench = Bench(config, lineup, lineup.settings, model, Console(file=io.StringIO()))  # type: ignore[arg-type]
    bench.run()
    return bench


@pytest.fixture(scope="module")
def honest(tiny_model: Path) -> Bench:
    """A run in which nothing is planted."""
    with lined_up(tiny_model) as lineup:
        return run(lineup, tiny_model)


def record(results: dict[str, Any], name: str, concurrency: int = 1) -> dict[str, Any]:
    (found,) = (r for r in results["summary"] if (r["contestant"], r["concurrency"]) == (name, concurrency))
    return dict(found)


def test_what_works_is_lossless(honest: Bench) -> None:
    results = honest.results(partial=False)
    assert honest.lossless
    assert results["lossless"]["differences"] == []
    checks = {(c["contestant"], c["against"]): (c["equal"], c["answers"]) for c in results["lossless"]["checks"]}
    # Six requests (two conversations have a second turn), one and three at a time, twice; plain's own reference left out.
    assert checks["prompt_lookup", "plain"] == checks["prompt_lookup", "hf"] == checks["hf", "plain"] == (24, 24)
    assert checks[PLAIN, "plain"] == (18, 18)
    assert checks["hf_prompt_lookup", "hf"] == (12, 12)
    assert record(results, PLAIN)["tau"] == 1.0
    assert set(record(results, "prompt_lookup")["tasks"]) == {"copy", "talk"}
    assert record(results, "hf")["loop"] is None


@pytest.mark.usefixtures("slow_machine")
def test_a_drafter_that_is_always_right_is_faster(
    lineup: DirectLineup, honest: Bench, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [(*request.prompt, *honest.answers[request.id]) for request in honest.requests]

    def right(self: PromptLookupSession, max_nodes: int) -> TokenTree:
        so_far = tuple(self._tokens)
        future = next(tokens[len(so_far) :] for tokens in known if tokens[: len(so_far)] == so_far)
        return chain(future[: min(4, max_nodes)], "prompt_lookup")

    monkeypatch.setattr(PromptLookupSession, "draft", right)
    bench = run(lineup, tiny_model)
    found = record(bench.results(partial=False), "prompt_lookup")
    assert bench.lossless
    assert found["tau"] >= 4
    assert found["speed_up"][PLAIN]["low"] > 1.5
    assert found["loop"]["acceptance_by_source"]["prompt_lookup"] > 0.9


@pytest.mark.usefixtures("slow_machine")
def test_a_drafter_that_is_always_wrong_is_slower_and_still_lossless(
    lineup: DirectLineup, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: PromptLookupSession, max_nodes: int) -> TokenTree:
        # The model never says this token: it is reserved for another role.
        return chain([3] * max_nodes, "prompt_lookup")

    monkeypatch.setattr(PromptLookupSession, "draft", wrong)
    bench = run(lineup, tiny_model)
    results = bench.results(partial=False)
    assert bench.lossless
    found = record(results, "prompt_lookup")
    assert found["tau"] < 1.05
    assert found["speed_up"][PLAIN]["high"] < 0.7
    assert found["loop"]["acceptance_by_source"]["prompt_lookup"] < 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_acceptance_rule_that_takes_anything_is_not_lossless(
    lineup: DirectLineup, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    def gullible(tree: TokenTree, choose_at: Callable[[int], int], stop: StopRule) -> Accepted:
        """Takes the first drafted token for the target's own, unseen."""
        if not len(tree):
            return acceptance_walk(tree, choose_at, stop)
        tokens = (tree.tokens[0],)
        return Accepted(path=(), tokens=tokens, finish_reason=stop.after(list(tokens)))

    acceptance_walk = acceptance.walk
    monkeypatch.setattr(verify.acceptance, "walk", gullible)
    # What is compiled stands for the walk where it can.
    monkeypatch.setattr(verify, "walk_together", lambda *_: None)
    bench = run(lineup, tiny_model, temperature)
    results = bench.results(partial=False)
    assert not bench.lossless
    differences = [d for d in results["lossless"]["differences"] if d["contestant"] == "prompt_lookup"]
    assert differences
    if temperature == 0:
        assert all(
            d["near_tie"] is False for d in differences if d["token"] is not None and d["reference_token"] is not None
        )
    # The reference keeps its word, whatever the rule does with drafts.
    assert not [d for d in results["lossless"]["differences"] if d["contestant"] == PLAIN]
    tables = {table.title: table for table in all_tables(results)}
    row = next(row for row in tables["Speed, 1 at once"].rows if row[0] == "prompt_lookup")
    assert any(cell.startswith("NO (") for cell in row)
    assert len(tables["Answers that differ"].rows) == len(results["lossless"]["differences"])
