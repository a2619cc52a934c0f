"""Several models of one kind, each with a name: who may use which, which one a request gets, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.models.named_models import read_models
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.service import DrafterService
from services.router.comparisons import plan_comparisons
from services.router.drafters import TrainedDrafter, suited_to, usable_by
from services.router.plans import make_plan
from services.router.rules.conditions import read_conditions
from services.router.rules.facts import Facts
from services.router.rules.fields import Field
from services.router.rules.first_match import planned, tried_rules
from services.router.rules.reading import read_rules
from services.router.strategies import StrategyConfig, check_default, served
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import DraftFailure, OpenSession
from speculation.sources import kind_of, runs_model, source_of, spec_of
from tests.drafters.model_source import NAME, ModelDouble, register
from tests.running.refusals import refuses
from tests.unit.router.test_router import asking

FACTS = Facts(
    tenant="acme",
    key="",
    model="m",
    prompt_tokens=10,
    sampled=False,
    grammar=False,
    prediction=False,
    tools=False,
    open_requests=1,
    at=datetime(2026, 11, 26, tzinfo=UTC),
    headers={},
    metadata={},
    system_prompt="",
)


def named(name: str, kind: str = "fspad", *, tenants: tuple[str, ...] = (), when: Mapping[str, Any] = {}) -> TrainedDrafter:
    source = kind if name == kind else source_of(kind, name)
    layers = (-1,) if kind == "fspad" else ()
    conditions = read_conditions(Field("here", "when", when))
    return TrainedDrafter(name=name, source=source, layers=layers, tenants=tenants, when=conditions)


CODE, LAW, LONG, PLAIN = (
    named("code"),
    named("law", tenants=("firm", "court")),
    named("long", "draft_model", when={"prompt_tokens": {"min": 100}}),
    named("fspad"),
)
CONFIG = StrategyConfig(trained=(CODE, LAW, LONG, PLAIN))
_ALLOWED_NAME = "1 to 40 of the characters A-Z a-z 0-9 . _ -, beginning with a letter or digit, and no source's name"


def test_a_source_with_a_model_of_a_name() -> None:
    assert kind_of("fspad@code") == kind_of("fspad") == "fspad"
    assert spec_of("fspad@code") is spec_of("fspad") is not None
    assert runs_model("fspad@code") and not runs_model("suffix") and spec_of("nothing@code") is None


def test_who_may_use_which() -> None:
    assert usable_by(CONFIG.trained, "firm") == CONFIG.trained
    assert usable_by(CONFIG.trained, "acme") == usable_by(CONFIG.trained, None) == (CODE, LONG, PLAIN)
    short, long = suited_to(CONFIG.trained, FACTS), suited_to(CONFIG.trained, replace(FACTS, prompt_tokens=100))
    assert [each.name for each in short if each.only_named] == ["long"]
    assert not any(each.only_named for each in long)


def sources(config: StrategyConfig = CONFIG, facts: Facts = FACTS, **asked: object) -> tuple[str, ...]:
    return make_plan(asking(**asked), config.for_request(facts)).sources


def test_without_a_name_all_that_suit_the_request_draft() -> None:
    texts = ("suffix", "recycling")
    assert sources() == (*texts, "fspad@code", "fspad")
    assert sources(facts=replace(FACTS, tenant="firm")) == (*texts, "fspad@code", "fspad@law", "fspad")
    assert sources(facts=replace(FACTS, prompt_tokens=100)) == (*texts, "fspad@code", "fspad", "draft_model@long")
    # A strategy of its own has the first one's.
    assert sources(strategy="fspad") == ("fspad@code",)
    many = StrategyConfig(trained=tuple(named(f"m{number}") for number in range(12)))
    assert sources(many) == (*texts, *(f"fspad@m{number}" for number in range(8)))


def test_a_request_that_names_one_gets_that_one() -> None:
    assert sources(drafter="code") == ("suffix", "recycling", "fspad@code")
    assert sources(drafter="fspad", strategy="blend") == ("suffix", "recycling", "fspad")
    assert sources(drafter="fspad", strategy="fspad") == ("fspad",)
    # Also where its conditions do not hold.
    assert sources(drafter="long") == ("suffix", "recycling", "draft_model@long")
    assert sources(drafter="long", strategy="draft_model") == ("draft_model@long",)
    plan = make_plan(asking(drafter="code", strategy="fspad"), CONFIG.for_request(FACTS))
    assert (plan.observe_layers, plan.observe_prompt, plan.effort, plan.max_nodes) == ((-1,), True, "paper", 32)


@pytest.mark.parametrize("name", ["law", "lawyer", ""])
def test_another_tenants_model_is_refused_as_one_that_does_not_exist(name: str) -> None:
    with refuses(InvalidArgument, "speculation.drafter", name or "empty", "one of code, long, fspad"):
        make_plan(asking(drafter=name), CONFIG.for_request(FACTS))
    assert sources(facts=replace(FACTS, tenant="court"), drafter="law")[2:] == ("fspad@law",)


def test_no_message_and_no_comparison_names_another_tenants_model() -> None:
    hidden = StrategyConfig(trained=(LAW,))
    with refuses(InvalidArgument, "speculation.drafter", "law", "unset: no model drafts here"):
        make_plan(asking(drafter="law"), hidden.for_request(FACTS))
    with refuses(InvalidArgument, "speculation.strategy", "fspad") as caught:
        make_plan(asking(strategy="fspad"), hidden.for_request(FACTS))
    assert "law" not in str(caught.value)
    (compared,) = plan_comparisons(asking(compare=("blend",), tenant="acme", drafter="code"), CONFIG)
    assert compared.without == ("fspad@code", "fspad", "draft_model@long")


@pytest.mark.parametrize("strategy", ["suffix", "draft_model", "autoregressive", "medusa"])
def test_a_strategy_that_the_named_model_does_not_draft_for(strategy: str) -> None:
    config = replace(CONFIG, trained=(*CONFIG.trained, named("medusa", "medusa")))
    field = "speculation.strategy" if strategy in ("draft_model", "medusa") else "speculation.drafter"
    with refuses(InvalidArgument, field):
        sources(config, drafter="code", strategy=strategy)


def test_which_strategies_there_are() -> None:
    assert {"fspad", "draft_model"} <= set(served(CONFIG)) and "medusa" not in served(CONFIG)
    check_default(replace(CONFIG, strategy="fspad"))
    # The default is everybody's.
    with refuses(ConfigurationError, field="router.strategy", value="draft_model"):
        check_default(replace(CONFIG, strategy="draft_model"))
    with refuses(ConfigurationError, field="router.strategy", value="fspad"):
        check_default(StrategyConfig(strategy="fspad", trained=(LAW,)))


def test_a_rule_names_one() -> None:
    entries = [
        {"name": "law", "when": {"header": {"x-task": "law"}}, "set": {"drafter": "law", "strategy": "fspad"}},
        {"name": "rest", "set": {"drafter": "code"}},
    ]
    rules = read_rules(entries, "rules", CONFIG)

    def by_rule(facts: Facts, **asked: object) -> tuple[str, tuple[str, ...]]:
        plan, rule = planned(rules, asking(**asked), facts, CONFIG.for_request(facts))
        return rule, plan.sources

    task = replace(FACTS, headers={"x-task": "law"})
    assert by_rule(replace(task, tenant="firm")) == ("law", ("fspad@law",))
    # A tenant that may not use it is as one without the rule.
    assert by_rule(task) == by_rule(FACTS) == ("rest", ("suffix", "recycling", "fspad@code"))
    assert by_rule(FACTS, drafter="fspad") == ("rest", ("suffix", "recycling", "fspad"))
    assert by_rule(FACTS, strategy="suffix") == ("", ("suffix",))
    tried = list(tried_rules(rules, asking(), task, CONFIG.for_request(task)))
    assert "one of code, long, fspad" in tried[0].why_not and tried[1].plan is not None
    with refuses(ConfigurationError, field="set.drafter", allowed="one of code, law, long, fspad"):
        read_rules([{"name": "x", "set": {"drafter": "lore"}}], "rules", CONFIG)
    with refuses(ConfigurationError, field="set.drafter", allowed="left out: no model drafts here"):
        read_rules([{"name": "x", "set": {"drafter": "code"}}], "rules", StrategyConfig())


def test_the_setting_takes_folders_and_mappings() -> None:
    entries = [Path("a"), {"folder": "b", "name": "code", "tenants": "acme", "when": {"sampled": True}}, {"folder": "c"}]
    first, second, third = read_models(entries)  # type: ignore[arg-type]
    assert (first.folder, first.name, first.tenants, first.when) == (Path("a"), "", (), ())
    assert (second.folder, second.name, second.tenants) == (Path("b"), "code", ("acme",))
    assert [each.holds(replace(FACTS, sampled=sampled)) for each in second.when for sampled in (True, False)] == [
        True,
        False,
    ]
    assert (third.folder, third.name) == (Path("c"), "")


@pytest.mark.parametrize(
    ("entry", "field", "allowed"),
    [
        ({"name": "code"}, "folder", "a text of 1 to 512 characters"),
        *(({"folder": "a", "name": name}, "name", _ALLOWED_NAME) for name in ("fspad", "a@b", "x" * 41, 7, "")),
        ({"folder": "a", "tags": 1}, "tags", "left out: known here are folder, name, tenants, when"),
        ({"folder": "a", "tenants": []}, "tenants", "a list of 1 to 64"),
        ({"folder": "a", "when": {"weather": "fine"}}, "when.weather", "known in when are tenant"),
        ({"folder": "a", "when": {"system_prompt": "("}}, "when.system_prompt", "a regular expression as RE2 has it"),
    ],
    ids=str,
)
def test_what_is_wrong_in_the_setting_is_named(entry: dict[str, Any], field: str, allowed: str) -> None:
    with refuses(ConfigurationError, field=field, allowed=allowed, says="drafter.models, model 2"):
        read_models([Path("a"), entry])


def test_a_drafter_named_twice_is_refused() -> None:
    twice = [{"folder": "a", "name": "code"}, {"folder": "b", "name": "code"}]
    with refuses(ConfigurationError, field="name", value="'code'", allowed="a name that no other model has"):
        read_models(twice)


async def test_each_model_of_a_kind_drafts_under_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, ModelDouble(answer=(7, 8)))
    made: list[dict[str, Path]] = []

    def make(config: DrafterConfig) -> ModelDouble:
        made.append(dict(config.trained.checkpoints))
        return ModelDouble(answer=(7, 8) if config.trained.checkpoints[NAME] == tmp_path / "a" else (9,))

    monkeypatch.setattr("tests.drafters.model_source.make", make)
    folders = {source_of(NAME, "a"): tmp_path / "a", source_of(NAME, "b"): tmp_path / "b"}
    service = DrafterService(replace(DrafterConfig(), trained=TrainedConfig(checkpoints=folders)))
    drafts: dict[str, tuple[tuple[int, ...], set[str]]] = {}
    for number, texts in enumerate(((), ("prompt_lookup",))):
        opening = OpenSession(
            session_id=f"s{number}", tokens=(1, 2, 3), prompt_length=3, sources=(*texts, *folders), max_nodes=8
        )
        await service.open(opening)
        for draft in [each async for each in service.further(opening.session_id)]:
            drafts[draft.group] = draft.tree.tokens, set(draft.tree.sources)
        if not texts:
            assert drafts == {"double@a": ((7, 8), {"double@a"}), "double@b": ((9,), {"double@b"})}
    # With text sources, the one that comes last has both in its tree.
    assert any(names == set(folders) for _, names in drafts.values())
    assert made == [{NAME: tmp_path / "a"}, {NAME: tmp_path / "b"}]
    unknown = OpenSession(session_id="x", tokens=(1,), prompt_length=1, sources=("double@c",), max_nodes=8)
    refused = await service.open(unknown)
    assert isinstance(refused, DraftFailure) and "double@c" in refused.reason


def test_the_setting_may_be_given_as_a_flag() -> None:
    from cluster.settings.config import load

    entries = ["/weights/a", {"folder": "/weights/b", "name": "code", "tenants": ["acme"]}]
    models = load(flags=[f"drafter.models={json.dumps(entries)}"], environ={}).drafter.models
    assert (
        models is not None and read_models(models)[1].name == "code" and read_models(models)[0].folder == Path("/weights/a")
    )
