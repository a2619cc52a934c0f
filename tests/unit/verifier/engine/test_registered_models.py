"""Models that a drafter outside of the service tells of: which a verifier takes, and how a router plans with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.router.config import RouterConfig
from services.router.drafters import TrainedDrafter, as_drafter, registered
from services.router.plans import make_plan
from services.router.rules.rule_book import RuleBook
from services.router.strategies import StrategyConfig, check_default, served
from services.verifier.engine.origins import Origin
from services.verifier.engine.registered_models import RegisteredModels
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.held_models import DrafterCard, HeldModel
from tests.running.refusals import refuses
from tests.unit.router.test_named_models import FACTS
from tests.unit.router.test_router import asking

CODE, LAW = HeldModel(kind="fspad", name="code", layers=(-1,)), HeldModel(kind="fspad", name="law", tenants=("firm",))


@dataclass
class Link:
    """A link of which nothing but the card is read."""

    card: DrafterCard | None = None


def check(layers: Sequence[int]) -> None:
    for layer in layers:
        if layer > 29:
            raise InvalidArgument("observe_layers", layer, "at most 29")


def of(link: Link, *beside: HeldModel, tokenizer: str = "ours", uno: bool = False) -> RegisteredModels:
    origins = [Origin(name="far", link=link, trusted=False)]  # type: ignore[arg-type]
    if beside:
        origins.append(Origin(name="near", link=Link(), trusted=True, models=beside))  # type: ignore[arg-type]
    return RegisteredModels(origins, check, tokenizer, uno)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (
            DrafterCard(held=(HeldModel(kind="medusa", name="mine"),)),
            "name is 'mine': must be a name that no other model has",
        ),
        (DrafterCard(held=(CODE,), target="theirs", tokenizer="another"), "model is theirs, which has another tokenizer"),
        (DrafterCard(held=(replace(CODE, layers=(30,)),)), "observe_layers"),
        (DrafterCard(held=(replace(CODE, layers=tuple(range(12))),)), "layers is 18 of all models"),
        (DrafterCard(held=(HeldModel(kind="uno"),)), "uno"),
    ],
    ids=["name", "tokenizer", "layer", "layers", "uno"],
)
def test_a_model_that_cannot_be_used_is_left_out(card: DrafterCard, said: str, caplog: pytest.LogCaptureFixture) -> None:
    mine = HeldModel(kind="eagle3", name="mine", layers=tuple(range(12, 18)))
    found = of(Link(card), mine)
    for _ in range(2):
        assert found.held == (mine,)
    # Once, however often a router asks.
    (told,) = caplog.messages
    assert "far: its model" in told and said in told


def test_what_is_held_changes_with_what_is_told() -> None:
    link = Link()
    found = of(link)
    assert found.held is None
    link.card = DrafterCard(held=(CODE, LAW), tokenizer="ours")
    assert found.held == (CODE, LAW)
    link.card = DrafterCard()
    assert found.held == ()
    link.card = DrafterCard(held=(HeldModel(kind="uno"),), tokenizer="another")
    assert of(link, uno=True).held == () and of(link, tokenizer="", uno=True).held == link.card.held


def test_an_origin_serves_what_no_other_does() -> None:
    origin = Origin(name="far", link=Link(), trusted=False, others=frozenset({"fspad"}))  # type: ignore[arg-type]
    assert origin.serves(("suffix", "fspad", "fspad@code")) == ("suffix", "fspad@code")


def named(name: str, **fields: Any) -> TrainedDrafter:
    return as_drafter(HeldModel(kind="fspad", name=name, **fields))


@pytest.mark.parametrize(
    ("ours", "told", "tenants"),
    [
        ((), (), ()),
        (("a",), (), ("a",)),
        ((), ("a",), ("a",)),
        (("a", "b"), ("b", "c"), ("b",)),
        (("a",), ("b",), None),
    ],
)
def test_both_say_whose_a_model_is(
    ours: tuple[str, ...], told: tuple[str, ...], tenants: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = registered([named("code", tenants=ours)], [HeldModel(kind="fspad", name="code", tenants=told)])
    assert [each.tenants for each in found] == ([] if tenants is None else [tenants])
    assert bool(caplog.messages) == (tenants is None)


def test_both_say_when_a_model_drafts(caplog: pytest.LogCaptureFixture) -> None:
    ours = [named("code", when='{"sampled": true}')]
    held = HeldModel(kind="fspad", name="code", layers=(3,), when='{"tools": true}')
    (found,) = registered(ours, [held])
    assert [each.name for each in found.when] == ["sampled", "tools"] and found.layers == (3,)
    for wrong, said in (
        (replace(held, when='{"weather": "rain"}'), "weather"),
        (replace(held, when="["), "a mapping"),
        (replace(held, when='{"system_prompt": "("}'), "system_prompt"),
        (replace(held, when='{"system_prompt": "\\ud800"}'), "system_prompt"),
        (replace(held, kind="eagle"), "a name that no other model has"),
    ):
        caplog.clear()
        assert registered(ours, [wrong]) == () and said in caplog.text


def test_plans_are_made_with_what_is_held() -> None:
    config = StrategyConfig(trained=(named("gone"),), registers=True)
    check_default(replace(config, strategy="medusa"))
    untold, told = config.with_held(None), config.with_held([CODE, LAW, HeldModel(kind="medusa", blended=False)])
    assert "medusa" not in served(untold) and {"medusa", "fspad"} <= set(served(told))
    assert make_plan(asking(), told.for_request(FACTS)).sources == ("suffix", "recycling", "fspad@code")
    assert make_plan(asking(drafter="gone"), untold).sources == ("suffix", "recycling", "fspad@gone")
    with refuses(InvalidArgument, field="speculation.drafter", value="gone", allowed="one of code, law, medusa"):
        make_plan(asking(drafter="gone"), told)
    with refuses(ConfigurationError, field="router.strategy", value="medusa"):
        check_default(replace(untold, strategy="medusa"))


def test_rules_wait_for_those_that_are_not_there_yet(caplog: pytest.LogCaptureFixture) -> None:
    rules = (
        {"name": "a", "when": {"sampled": True}, "set": {"strategy": "medusa"}},
        {"name": "b", "when": {"tools": True}, "set": {"sources": ["fspad@law", "suffix"]}},
        {"name": "c", "set": {"drafter": "code"}},
    )
    strategy = StrategyConfig(registers=True)
    with refuses(ConfigurationError, field="set.strategy", value="'medusa'"):
        RuleBook(RouterConfig(model_path="", strategy=StrategyConfig(), rules=rules))
    book = RuleBook(RouterConfig(model_path="", strategy=strategy, rules=rules))

    def matched() -> list[str]:
        asked = (replace(FACTS, sampled=True), replace(FACTS, tools=True, tenant="firm"), FACTS)
        return [book.plan(asking(), facts)[1] for facts in asked]

    assert matched() == ["", "", ""]
    book.follow(strategy.with_held([CODE, LAW, HeldModel(kind="medusa")]))
    assert matched() == ["a", "b", "c"] and not caplog.messages
    book.follow(strategy.with_held([LAW]))
    assert matched() == ["", "b", ""]
    assert "a rule is passed over" in caplog.text and "rule 1: set.strategy is 'medusa'" in caplog.text
