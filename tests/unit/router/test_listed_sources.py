"""A plan by a list of sources: what it becomes, what is refused, and what rules and the benchmark make of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.bench.contestants import check_names
from benchmarks.peers import peer_outrider
from services.api.messages import ClientRequest, RequestedSampling
from services.router.drafters import TrainedDrafter
from services.router.plans import make_plan
from services.router.rules.facts import Facts
from services.router.rules.first_match import planned
from services.router.rules.reading import read_rules
from services.router.strategies import StrategyConfig
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.sources import LISTED, STRATEGIES
from tests.running.refusals import refuses

TRAINED = (TrainedDrafter(name="own", source="fspad"), TrainedDrafter(name="code", source="eagle@code", only_named=True))
CONFIG = StrategyConfig(retrieval=True, trained=TRAINED)
FACTS = Facts(
    tenant="acme", key="", model="tiny", prompt_tokens=5, sampled=False, grammar=False, prediction=False, tools=False,
    open_requests=1, at=datetime(2026, 11, 28, tzinfo=UTC), headers={}, metadata={}, system_prompt="",
)  # fmt: skip


def asking(*sources: str, **given: Any) -> ClientRequest:
    return ClientRequest(input="x", sampling=RequestedSampling(), sources=sources or None, **given)


@pytest.mark.parametrize(
    ("listed", "sources", "nodes"),
    [
        (("lookahead", "rest"), ("lookahead", "retrieval"), 120),
        (("suffix", "retrieval"), ("suffix", "retrieval"), 32),
        (("rest",), ("retrieval",), 64),
        (("fspad", "prompt_lookup"), ("fspad", "prompt_lookup"), 32),
        (("eagle@code", "anpd"), ("eagle@code", "anpd"), 32),
    ],
)
def test_exactly_what_is_listed_drafts_one_tree(listed: tuple[str, ...], sources: tuple[str, ...], nodes: int) -> None:
    plan = make_plan(asking(*listed), CONFIG)
    assert (plan.strategy, plan.sources, plan.max_nodes, plan.effort) == ("blend", sources, nodes, "paper")
    assert plan == make_plan(asking(*listed, strategy="blend"), CONFIG)
    assert make_plan(asking(*listed, effort="measured"), CONFIG).effort == "measured"


def test_it_needs_what_its_sources_need() -> None:
    plan = make_plan(asking("lookahead", "fspad"), CONFIG)
    assert plan.observe_top_k == 1 and plan.observe_prompt and plan.observe_layers == TRAINED[0].layers
    plan = make_plan(asking("lookahead", prediction="as before"), CONFIG)
    assert plan.sources == ("prediction", "lookahead")
    assert make_plan(asking("suffix", "fspad", drafter="own"), CONFIG).sources == ("suffix", "fspad")


@pytest.mark.parametrize(
    ("request_", "field", "value", "allowed"),
    [
        (asking("suffix", "magic"), "sources", "magic", "one of anpd"),
        (asking("suffix", ""), "sources", "empty", "one of anpd"),
        (asking("blend"), "sources", "blend", "one of anpd"),
        (asking("prediction"), "sources", "prediction", "one of anpd"),
        (asking("semantic"), "sources", "semantic", "this server has no index of hidden states"),
        (asking("suffix", "medusa"), "sources", "medusa", "this server has no checkpoint of medusa"),
        (asking("eagle"), "sources", "eagle", "this server has no checkpoint of eagle"),
        (asking("eagle@law"), "sources", "eagle@law", "one of anpd"),
        (asking("rest", "anpd", "spectra_retrieval"), "sources", "spectra_retrieval", "left out: rest is the same source"),
        (asking(*["suffix"] * 17), "sources", "17 sources", f"1 to {limits.MAX_LISTED_SOURCES} sources"),
        (asking("anpd", strategy="suffix"), "sources", "anpd", "only blend takes a list"),
        (asking("anpd", strategy="auto"), "sources", "anpd", "only blend takes a list"),
        (asking("anpd", "rest", private=True), "sources", "rest", "left out with privacy: strict"),
        (asking("anpd", drafter="own"), "drafter", "own", "sources that name fspad as well"),
        (asking("anpd", group="us"), "group", "us", "unset with the strategy blend"),
    ],
)
def test_what_is_refused(request_: ClientRequest, field: str, value: str, allowed: str) -> None:
    with refuses(InvalidArgument, field=f"speculation.{field}", value=value, allowed=allowed):
        make_plan(request_, CONFIG)


def test_all_that_may_be_listed_is_a_source_of_a_strategy() -> None:
    assert {kind for own in STRATEGIES.values() for kind in own} <= set(LISTED)
    assert all(LISTED[LISTED[name]] == LISTED[name] for name in LISTED)


@pytest.mark.parametrize(
    ("request_", "override", "sources"),
    [
        (asking(), False, ("lookahead", "retrieval")),
        (asking("anpd"), False, ("anpd",)),
        (asking(strategy="suffix"), False, ("suffix",)),
        (asking("anpd"), True, ("lookahead", "retrieval")),
        (asking(strategy="suffix"), True, ("lookahead", "retrieval")),
    ],
)
def test_a_rule_lists_sources(request_: ClientRequest, override: bool, sources: tuple[str, ...]) -> None:
    entry = {"name": "one", "set": {"sources": ["lookahead", "rest"]}, "override": override}
    plan, _ = planned(read_rules([entry], "rules", CONFIG), request_, FACTS, CONFIG)
    assert plan.sources == sources


def test_a_rules_strategy_takes_the_place_of_a_requests_list() -> None:
    entry = {"name": "one", "set": {"strategy": "anpd"}, "override": True}
    plan, name = planned(read_rules([entry], "rules", CONFIG), asking("suffix"), FACTS, CONFIG)
    assert (plan.strategy, plan.sources, name) == ("anpd", ("anpd",), "one")


def test_a_row_of_the_benchmark() -> None:
    check_names(("blend", "lookahead+rest"), ())
    for name in ("lookahead+blend", "+suffix", "suffix+magic"):
        with refuses(ConfigurationError, field="--strategies"):
            check_names((name,), ())
    load = {"temperature": 0.0, "max_tokens": 4, "tenant": "x"}
    message = peer_outrider._message("lookahead+rest", {"prompt": [1], "seed": 1}, load)
    assert (message.strategy, message.sources) == (None, ("lookahead", "rest"))
    options = peer_outrider._options("lookahead+rest", {"prompt": [1], "seed": 1}, load)
    assert options["sources"] == ["lookahead", "rest"] and "strategy" not in options
