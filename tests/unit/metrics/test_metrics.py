"""The metrics port, its sinks and the table of names; what each component counts is what happened."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from types import FrameType, SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.links.in_process import InProcessDraftLink
from services.metrics.families import FAMILIES
from services.metrics.observed_drafter import ObservedDrafter, ObservedRetrieval
from services.metrics.prometheus_sink import PrometheusSink
from services.metrics.registry import DROPPED
from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.singles import Singles
from services.verifier.engine.stats import LoopStats
from speculation.errors import (
    Unavailable,
)
from speculation.messages import RetrievalQuery, Retrieved
from speculation.types import EMPTY_TREE, TokenTree
from tests.engine.fakes import PLAIN, RandomDrafter, RandomRetriever, ToyTarget, collect, decoding, request
from tests.engine.simulated import PASS_S, SimulatedBudget, simulated
from tests.engine.simulated import decoding as simulated_decoding


def told(sink: PrometheusSink) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, by name and labels."""
    families = text_string_to_metric_families(sink.exposition().decode())
    return {
        (sample.name.removeprefix("outrider_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def of(sink: PrometheusSink, name: str, **labels: str) -> float:
    """One sample."""
    return told(sink)[name, tuple(sorted(labels.items()))]


def test_the_table_of_names() -> None:
    for name, family in FAMILIES.items():
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert bool(family.buckets) == (family.kind == "histogram"), name
        assert list(family.buckets) == sorted(set(family.buckets))
        assert all(bound > 0 for bound in family.buckets), "Ray refuses a bound of 0"
        assert not {"tenant", "request", "request_id", "key", "user", "session", "le"} & set(family.labels), name
        assert family.help.endswith("."), name


def test_what_is_counted_is_told() -> None:
    sink = PrometheusSink()
    seconds = sink.histogram("step_seconds")
    for value in (0.0004, 0.0005, 0.003, 90.0):
        seconds.observe(value, "decode")
    sink.counter("requests_total").add(2, "stop", "OK")
    # Handles of one name are one.
    sink.counter("requests_total").add(1, "stop", "OK")
    sink.gauge("ready").set(1)
    sink.gauge("ready").set(0)
    kept = {"suffix": 3}
    sink.follow("drafted_by_source_total", lambda: {(name,): count for name, count in kept.items()})
    sink.follow("drafted_by_source_total", lambda: {("suffix",): 4})
    kept["recycling"] = 1
    assert of(sink, "requests_total", outcome="stop", code="OK") == 3
    assert of(sink, "ready") == 0
    assert of(sink, "drafted_by_source_total", source="suffix") == 7
    assert of(sink, "drafted_by_source_total", source="recycling") == 1
    assert of(sink, "step_seconds_bucket", kind="decode", le="0.0005") == 2
    assert of(sink, "step_seconds_bucket", kind="decode", le="5.0") == 3
    assert of(sink, "step_seconds_bucket", kind="decode", le="+Inf") == of(sink, "step_seconds_count", kind="decode") == 4
    assert of(sink, "step_seconds_sum", kind="decode") == pytest.approx(90.0039)
    assert b"_created" not in sink.exposition()
    # A sink shares nothing with another one.
    assert PrometheusSink().exposition() == b""


def test_mistakes_of_ours_are_found_at_once() -> None:
    sink = PrometheusSink()
    for wrong in (
        lambda: sink.counter("no_such_total"),
        lambda: sink.gauge("requests_total"),
        lambda: sink.histogram("ready"),
    ):
        with pytest.raises(KeyError):
            wrong()
    with pytest.raises(KeyError):
        sink.follow("step_seconds", dict)
    with pytest.raises(ValueError, match="labels"):
        sink.counter("requests_total").add(1, "stop")


def test_labels_cannot_fill_the_memory() -> None:
    sink = PrometheusSink()
    nodes = sink.counter("drafter_nodes_total")
    for number in range(2000):
        nodes.add(1, f"source {number}")
    counts = {labels: value for (name, labels), value in told(sink).items() if name == "drafter_nodes_total"}
    assert len(counts) == 513
    assert sum(counts.values()) == 2000


def test_a_reader_that_fails_hides_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> dict[tuple[str, ...], float]:
        raise RuntimeError("planted")

    sink = PrometheusSink()
    sink.follow("ready", fails)
    sink.follow("ready", lambda: {(): 1})
    sink.counter("preemptions_total").add(5)
    assert of(sink, "preemptions_total") == 5
    assert of(sink, "ready") == 1
    assert "ready cannot be read" in caplog.text


def test_threads_lose_no_count() -> None:
    sink = PrometheusSink()
    counter, seconds = sink.counter("generation_tokens_total"), sink.histogram("draft_wait_seconds")

    def count() -> None:
        for _ in range(2000):
            counter.add(1)
            seconds.observe(0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sink.exposition()
    assert of(sink, "generation_tokens_total") == of(sink, "draft_wait_seconds_count") == 8000


def test_nothing_is_counted_by_default() -> None:
    DROPPED.counter("requests_total").add(1, "stop", "OK")
    DROPPED.histogram("step_seconds").observe(1.0, "decode")
    DROPPED.gauge("ready").set(1)
    DROPPED.follow("ready", lambda: 1 / 0)  # type: ignore[arg-type, return-value]


# --- the verifier -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mood", ["good", "random"])
async def test_the_loop_counts_what_happened(mood: str) -> None:
    sink = PrometheusSink()
    drafter = ObservedDrafter(RandomDrafter(mood=mood), sink)
    async with decoding(ToyTarget(), InProcessDraftLink(drafter), metrics=sink) as loop:
        _, _, steps = await collect(loop, request("r.1", [1, 2, 3], max_tokens=40, ignore_eos=True))
        _, _, plain = await collect(loop, request("r.2", [1, 2, 3], PLAIN, max_tokens=5, ignore_eos=True))
        # The last step of a request is counted after its tokens are on their way.
        while of(sink, "iteration_tokens_sum") < 3 + 40 + 3 + 5:
            await asyncio.sleep(0.01)
        stats = loop.stats
    assert stats.times.steps == sum(of(sink, "step_seconds_count", kind=kind) for kind in ("prompt", "decode"))
    assert of(sink, "step_seconds_count", kind="prompt") == 2
    assert (
        of(sink, "step_rows_count") == of(sink, "draft_wait_seconds_count") == stats.times.steps == len(steps) + len(plain)
    )
    drafted = sum(step.num_drafted for step in steps)
    accepted = sum(len(step.accepted_sources) for step in steps)
    assert drafted > 0
    assert of(sink, "spec_decode_num_draft_tokens_total", strategy="test") == of(sink, "budget_nodes_sum") == drafted
    assert of(sink, "spec_decode_num_accepted_tokens_total", strategy="test") == accepted
    assert of(sink, "spec_decode_num_drafts_total", strategy="test") == sum(step.num_drafted > 0 for step in steps)
    # Passes without drafts bring tokens, too.
    for strategy, passes, tokens in (("test", len(steps), 40), ("autoregressive", len(plain), 5)):
        assert of(sink, "spec_decode_num_passes_total", strategy=strategy) == passes
        assert of(sink, "spec_decode_num_emitted_tokens_total", strategy=strategy) == tokens
    for position in (0, 1, 5, 31):
        at = sum(len(step.accepted_sources) > position for step in steps)
        assert of(sink, "spec_decode_num_accepted_tokens_per_pos_total", strategy="test", position=str(position)) == at
    assert of(sink, "drafted_by_source_total", source="test") == drafted
    assert ("spec_decode_num_drafts_total", (("strategy", "autoregressive"),)) not in told(sink)
    assert of(sink, "prefix_cache_queries_total") == 6
    assert of(sink, "num_requests_running") == of(sink, "num_requests_waiting") == 0
    assert of(sink, "drafter_drafts_total", group="") > 0
    assert of(sink, "drafter_nodes_total", source="test") >= drafted


@simulated
async def test_what_was_saved_is_counted_by_strategy_and_load() -> None:
    sink = PrometheusSink()
    link = InProcessDraftLink(RandomDrafter(mood="good"))
    async with simulated_decoding(ToyTarget(), link, budget=SimulatedBudget(PASS_S), metrics=sink) as loop:
        drafted, plain = await asyncio.gather(
            collect(loop, request("r.1", [1, 2, 3], max_tokens=120, ignore_eos=True)),
            collect(loop, request("r.2", [1, 2, 3], PLAIN, max_tokens=30, ignore_eos=True)),
        )
        while of(sink, "iteration_tokens_sum") < 3 + 120 + 3 + 30:
            await asyncio.sleep(0.01)
    saved = {
        strategy: sum(step.saved_s for step in steps)
        for strategy, (_, _, steps) in (("test", drafted), ("autoregressive", plain))
    }
    counted = {labels: value for (name, labels), value in told(sink).items() if name == "spec_decode_seconds_saved"}
    assert {dict(labels)["requests"] for labels in counted} == {"1", "2-3"}
    for strategy, seconds in saved.items():
        assert sum(value for labels, value in counted.items() if ("strategy", strategy) in labels) == pytest.approx(seconds)
    assert saved["test"] > PASS_S


@pytest.mark.parametrize(("requests", "band"), [(1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (7, "4-7"), (64, "64-127")])
def test_loads_are_counted_in_bands(requests: int, band: str) -> None:
    from services.verifier.engine.loop_metrics import _band

    assert _band(requests) == band


# --- retrieval ----------------------------------------------------------------------------------------------------


class Holding:
    """Looks up in nothing."""

    version: str | None = None
    switches = 0

    def look_up(self, queries: list[RetrievalQuery]) -> list[Retrieved]:
        if self.version is None:
            raise Unavailable("no index is loaded")
        found = asyncio.run(RandomRetriever(seed=5).retrieve(queries[0])).continuations
        return [Retrieved(continuations=found), *(Retrieved() for _ in queries[1:])]


def test_look_ups_and_versions() -> None:
    sink, holding = PrometheusSink(), Holding()
    observed = ObservedRetrieval(holding, sink)  # type: ignore[arg-type]
    queries = [RetrievalQuery(suffix=(1, 2), max_continuations=3, max_length=4)] * 3
    with pytest.raises(Unavailable):
        observed.look_up(queries)
    assert b"index_info{" not in sink.exposition()
    holding.version = "v1"
    assert len(observed.look_up(queries)) == 3
    holding.version = "v2"
    assert of(sink, "index_info", version="v2") == 1
    assert b"v1" not in sink.exposition()
    assert of(sink, "retrieval_failures_total") == of(sink, "retrieval_lookups_total", result="hit") == 1
    assert of(sink, "retrieval_lookups_total", result="miss") == 2
    assert of(sink, "retrieval_lookup_seconds_count") == 1


# --- what it costs ------------------------------------------------------------------------------------------------


def test_a_step_pays_microseconds() -> None:
    """Counted in calls of functions, which take a tenth of a microsecond to one; a real model's step takes 10,000 and more."""
    from services.verifier.engine.loop_metrics import LoopMetrics

    costs = []
    tree = TokenTree(tokens=(1,) * 32, parents=(-1,) * 32, sources=("suffix",) * 32)
    for sink in (PrometheusSink(), DROPPED):
        stats = LoopStats()
        counting = LoopMetrics(sink, stats, None)  # type: ignore[arg-type]
        work = PassWork(Singles([]), [_part(tree if number % 2 else EMPTY_TREE) for number in range(8)])
        counting.step(work, 0.02)
        calls = Counter[str]()

        def count(frame: FrameType, event: str, _: object, calls: Counter[str] = calls) -> None:
            calls[event] += 1

        sys.setprofile(count)
        try:
            counting.step(work, 0.02)
        finally:
            sys.setprofile(None)
        costs.append(calls["call"] + calls["c_call"])
    assert costs[0] < 150, costs


def _part(tree: TokenTree) -> Part:
    from services.verifier.model.target_port import Rows

    rows = Rows(request_id="s", context=9, tokens=(1, *tree.tokens), parents=tree.parents, logits=1 + len(tree))
    part = Part(request=SimpleNamespace(grammar=None), chain=rows.chain, verified=True, tree=tree)  # type: ignore[arg-type]
    part.rows = rows
    return part
