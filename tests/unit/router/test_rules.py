"""Rules of the router: which matches, what it sets, what is refused, and a file of them that is followed."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.api.messages import ClientRequest, RequestedSampling
from services.metrics.prometheus_sink import PrometheusSink, written
from services.router.config import RouterConfig
from services.router.rules.facts import Facts
from services.router.rules.first_match import planned, tried_rules
from services.router.rules.reading import parse_rules, read_rules
from services.router.rules.rule_book import RuleBook, rules_of
from services.router.strategies import StrategyConfig
from speculation.errors import ConfigurationError, InvalidArgument
from tests.running.refusals import refuses

CONFIG = StrategyConfig()
REQUEST = ClientRequest(input="text", sampling=RequestedSampling())
FACTS = Facts(
    tenant="acme",
    key="batch",
    model="tiny",
    prompt_tokens=500,
    sampled=False,
    grammar=False,
    prediction=False,
    tools=False,
    open_requests=3,
    at=datetime(2026, 11, 25, 23, 30, tzinfo=UTC),
    headers={"x-job": "nightly"},
    metadata={"task": "edit"},
    system_prompt="You are a coding assistant.",
)


def rule(when: dict[str, Any] | None = None, **sets: Any) -> dict[str, Any]:
    return {"name": "one", "when": when or {}, "set": sets or {"strategy": "suffix"}}


def matches(when: dict[str, Any], facts: Facts = FACTS) -> bool:
    # As a file says it.
    entries = yaml.safe_load(yaml.safe_dump([rule(when)]))
    return planned(read_rules(entries, "rules", CONFIG), REQUEST, facts, CONFIG)[1] == "one"


@pytest.mark.parametrize(
    ("when", "otherwise"),
    [
        ({"tenant": "acme"}, {"tenant": "else"}),
        ({"tenant": ["else", "acme"]}, {"tenant": ""}),
        ({"key": "batch"}, {"key": "chat"}),
        ({"model": "tiny"}, {"model": "large"}),
        ({"prompt_tokens": {"min": 500}}, {"prompt_tokens": 499}),
        ({"prompt_tokens": {"min": 1, "max": 500}}, {"prompt_tokens": 501}),
        ({"sampled": False}, {"sampled": True}),
        ({"grammar": False}, {"grammar": True}),
        ({"prediction": False}, {"prediction": True}),
        ({"tools": False}, {"tools": True}),
        ({"open_requests": {"max": 3}}, {"open_requests": 4}),
        ({"header": {"X-Job": "nightly"}}, {"headers": {"x-job": "daily"}}),
        ({"header": {"x-job": ["hourly", "nightly"]}}, {"headers": {}}),
        ({"metadata": {"task": "edit"}}, {"metadata": {"Task": "edit"}}),
        ({"system_prompt": "(?i)CODING"}, {"system_prompt": "You are a poet."}),
        ({"time": {"from": "22:00", "to": "06:00"}}, {"at": datetime(2026, 11, 25, 6, 0, tzinfo=UTC)}),
        ({"time": {"from": "23:30", "to": "23:31"}}, {"at": datetime(2026, 11, 25, 23, 31, tzinfo=UTC)}),
        # It is half past midnight there.
        (
            {"time": {"from": "0:00", "to": "1:00", "zone": "Europe/Berlin"}},
            {"at": datetime(2026, 6, 25, 23, 30, tzinfo=UTC)},
        ),
        ({"tenant": "acme", "sampled": False}, {"sampled": True}),
    ],
)
def test_a_condition_holds_or_not(when: dict[str, Any], otherwise: dict[str, Any]) -> None:
    assert matches(when)
    assert not matches(when, replace(FACTS, **otherwise))


def test_a_time_is_as_yaml_reads_it() -> None:
    (entry,) = yaml.safe_load("[{name: night, when: {time: {from: 22:00, to: 06:00}}, set: {strategy: suffix}}]")
    assert entry["when"]["time"]["from"] == 22 * 60
    assert planned(read_rules([entry], "rules", CONFIG), REQUEST, FACTS, CONFIG)[1] == "night"


def test_the_first_match_counts_and_says_what_is_done() -> None:
    entries = [
        {"name": "others", "when": {"tenant": "else"}, "set": {"strategy": "anpd"}},
        {"name": "ours", "when": {"tenant": "acme"}, "set": {"strategy": "suffix", "num_speculative_tokens": 3}},
        {"name": "rest", "set": {"strategy": "lookahead"}},
    ]
    rules = read_rules(entries, "rules", CONFIG)
    plan, name = planned(rules, REQUEST, FACTS, CONFIG)
    assert (name, plan.strategy, plan.max_nodes, plan.effort) == ("ours", "suffix", 3, "paper")
    assert planned(rules, REQUEST, replace(FACTS, tenant="third"), CONFIG)[1] == "rest"
    assert [(each.rule.name, each.why_not) for each in tried_rules(rules, REQUEST, FACTS, CONFIG)] == [
        ("others", "tenant is acme, not else"),
        ("ours", ""),
    ]


def test_a_rule_is_a_default_unless_it_overrides() -> None:
    entry = rule(strategy="suffix", num_speculative_tokens=3, effort="measured")
    said = replace(REQUEST, strategy="anpd")

    def by(entry: dict[str, Any], request: ClientRequest) -> tuple[str, int, str, str]:
        plan, name = planned(read_rules([entry], "rules", CONFIG), request, FACTS, CONFIG)
        return plan.strategy, plan.max_nodes, plan.effort, name

    assert by(entry, REQUEST) == ("suffix", 3, "measured", "one")
    # What is set for another strategy does not fit the one that is named.
    assert by(entry, said) == ("anpd", 8, "paper", "")
    assert by(entry, replace(REQUEST, num_speculative_tokens=5)) == ("suffix", 5, "measured", "one")
    assert by(entry | {"override": True}, replace(said, num_speculative_tokens=5)) == ("suffix", 3, "measured", "one")
    assert by(rule(effort="measured"), said) == ("anpd", 8, "measured", "one")
    # It ends the search, and leaves all as it is.
    assert by({"name": "one", "set": {}}, said) == ("anpd", 8, "paper", "one")


@pytest.mark.parametrize("wrong", [{"strategy": "none such"}, {"num_speculative_tokens": 513}])
def test_an_override_hides_no_mistake(wrong: dict[str, Any]) -> None:
    rules = read_rules([rule(strategy="suffix", num_speculative_tokens=3) | {"override": True}], "rules", CONFIG)
    with pytest.raises(InvalidArgument):
        planned(rules, replace(REQUEST, **wrong), FACTS, CONFIG)


def test_a_rule_that_does_not_suit_a_request_is_passed_over() -> None:
    indexed = StrategyConfig(retrieval=True)
    for request, entry, why in (
        (replace(REQUEST, prediction="text"), rule(strategy="suffix"), "prediction"),
        (replace(REQUEST, private=True), rule(strategy="rest"), "speculation.strategy"),
    ):
        rules = read_rules([entry], "rules", indexed)
        plan, name = planned(rules, request, FACTS, indexed)
        assert (plan.strategy, name) == ("auto", "")
        (tried,) = tried_rules(rules, request, FACTS, indexed)
        assert why in tried.why_not


@pytest.mark.parametrize(
    ("entry", "field", "value", "allowed"),
    [
        ("text", "it", "'text'", "a mapping"),
        (rule() | {"then": 1}, "then", "1", "left out: known here are name, when, set, override"),
        (rule({"tenat": "a"}), "when.tenat", "'a'", "left out: known in when are tenant, key, model"),
        (rule({"tenant": 7}), "when.tenant", "7", "a text"),
        (rule({"tenant": []}), "when.tenant", "[]", "a list of 1 to 64"),
        (rule({"prompt_tokens": 7}), "when.prompt_tokens", "7", "a mapping with some of min, max"),
        (rule({"prompt_tokens": {}}), "when.prompt_tokens", "{}", "min, max or both"),
        (rule({"prompt_tokens": {"min": "7"}}), "when.prompt_tokens.min", "'7'", "a whole number"),
        (rule({"prompt_tokens": {"min": 7, "max": 6}}), "when.prompt_tokens.max", "6", "a whole number from 7"),
        (rule({"sampled": "yes"}), "when.sampled", "'yes'", "true or false"),
        (rule({"time": {"from": "22:00"}}), "when.time", "{'from': '22:00'}", "a mapping with from and to"),
        (rule({"time": {"from": "25:00", "to": "1:00"}}), "when.time.from", "'25:00'", "a time of day"),
        (rule({"time": {"from": "1:00", "to": "1:00"}}), "when.time.to", "'1:00'", "another time than from"),
        (rule({"time": {"from": "1:00", "to": "2:00", "zone": "Mars"}}), "when.time.zone", "'Mars'", "time zone"),
        (rule({"header": {"Authorization": "x"}}), "when.header.Authorization", "'x'", "ask for tenant or key"),
        (rule({"header": {}}), "when.header", "{}", "a mapping of at least one name"),
        (rule({"metadata": {"task": True}}), "when.metadata.task", "true", "quote numbers and yes"),
        (rule({"system_prompt": "["}), "when.system_prompt", "'['", "as RE2 has it"),
        (rule({"system_prompt": "(a)\\1"}), "when.system_prompt", "'(a)\\\\1'", "as RE2 has it"),
        (rule({"system_prompt": "((a{100}){100}){100}"}), "when.system_prompt", "", "as RE2 has it"),
        (rule({"system_prompt": "\ud800"}), "when.system_prompt", "'\\ud800'", "whole characters"),
        (rule({"metadata": {"task": ["a", "\udc00"]}}), "when.metadata.task", "", "whole characters"),
        (rule({"metadata": {"\ud800": "a"}}), "when.metadata", "", "whole characters"),
        (rule({"system_prompt": "a" * 1001}), "when.system_prompt", "", "a text of 1 to 1000 characters"),
        (rule(strategy="spectra"), "set.strategy", "'spectra'", "one of anpd"),
        (rule(acceptance="rejection"), "set.acceptance", "'rejection'", "left out"),
        (rule(num_speculative_tokens=513), "set.num_speculative_tokens", "513", "from 0 to 512"),
        (rule(sources=["suffix", "magic"]), "set.sources", "'magic'", "one of anpd"),
        (rule(sources=["rest"]), "set.sources", "'rest'", "this server has no retrieval index"),
        (rule(sources=["suffix", "suffix"]), "set.sources", "'suffix'", "left out: suffix is the same source"),
        (rule(sources=[]), "set.sources", "[]", "a list of 1 to 64"),
        (rule(sources=["suffix"], strategy="suffix"), "set.sources", "['suffix']", "left out where strategy is set"),
        (rule(effort="much"), "set.effort", "'much'", "one of paper, measured"),
        (rule() | {"name": "none"}, "name", "'none'", "not none"),
        (rule() | {"override": 1}, "override", "1", "true or false"),
        ({"name": "one"}, "set", "null", "a mapping"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(entry: Any, field: str, value: str, allowed: str) -> None:
    with refuses(ConfigurationError, field=field, says=allowed) as caught:
        read_rules([rule() | {"name": "right"}, entry], "router.rules", CONFIG)
    assert str(caught.value).startswith(f"router.rules, rule 2: {field} is {value}")


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    for content, says in (
        (b"{}", "a list of rules"),
        (b"[", "expected"),
        (b"\xff", "decode"),
        (b" " * (1 << 20) + b"[]", "1 MiB"),
    ):
        with refuses(ConfigurationError, field="router.rules_file", value=str(file), says=says):
            parse_rules(content, file, CONFIG)
    with refuses(ConfigurationError, field="router.rules_file", says="cannot be read"):
        rules_of(RouterConfig(model_path="", rules_file=file))
    file.write_text("[]")
    with refuses(ConfigurationError, field="router.rules and router.rules_file"):
        rules_of(RouterConfig(model_path="", rules_file=file, rules=(rule(),)))
    with refuses(ConfigurationError, field="name", value="'one'", says="no other rule"):
        read_rules([rule(), rule()], "router.rules", CONFIG)
    with refuses(ConfigurationError, field="router.rules", value="257 rules"):
        read_rules([rule()] * 257, "router.rules", CONFIG)


def test_a_regular_expression_takes_linear_time() -> None:
    facts = replace(FACTS, system_prompt="a" * 2_000_000)
    # Python's own engine would try 2^16384 ways.
    assert not matches({"system_prompt": "(a+)+b"}, facts)
    # What stands behind the first 16,384 characters is not searched.
    assert not matches({"system_prompt": "b"}, replace(FACTS, system_prompt="a" * 16_384 + "b"))


def test_a_file_is_followed_and_a_wrong_one_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, seconds, sink = tmp_path / "rules.yaml", [0.0], PrometheusSink()
    file.write_text("[{name: first, set: {strategy: suffix}}]")
    book = RuleBook(RouterConfig(model_path="", rules_file=file), sink, clock=lambda: seconds[0])

    def after(text: str) -> str:
        file.write_text(text)
        seconds[0] += 2
        os.utime(file, ns=(0, 10**9 * int(seconds[0])))
        book.plan(REQUEST, FACTS)
        book.settle()
        return book.plan(REQUEST, FACTS)[1]

    assert book.plan(REQUEST, FACTS)[1] == "first"
    assert after("[{name: second, set: {strategy: suffix}}]") == "second"
    with caplog.at_level(logging.ERROR):
        assert after("[{name: third, set: {strategy: none such}}]") == "second"
    assert caplog.text.count("the rules stay as they were") == 1 and "set.strategy is 'none such'" in caplog.text
    assert after("[]") == ""
    shown = written(sink.collect()).decode()
    assert 'outrider_router_rules_reloads_total{outcome="ok"} 2.0' in shown
    assert 'outrider_router_rules_reloads_total{outcome="refused"} 1.0' in shown


def test_the_examples_of_the_page_are_rules() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/rules.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = [each.name for block in blocks for each in read_rules(yaml.safe_load(block), "rules.md", CONFIG)]
    assert names == ["long-documents", "edits", "search-team", "nightly", "full"]


def test_requests_are_counted_by_rule() -> None:
    sink = PrometheusSink()
    book = RuleBook(RouterConfig(model_path="", rules=(rule({"sampled": False}),)), sink)
    for sampled in (False, True, False):
        book.plan(REQUEST, replace(FACTS, sampled=sampled))
    shown = written(sink.collect()).decode()
    assert 'outrider_router_rules_matched_total{rule="one"} 2.0' in shown
    assert 'outrider_router_rules_matched_total{rule="none"} 1.0' in shown
