"""``outrider plan --explain``: which rule of the router a request would meet, and what would be done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.checks.preflight import generation_config, model_folder
from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import Settings
from services.api.http.json_body import parse_object
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.preparing import fitted, prepare
from services.api.messages import ClientRequest, HowAsked, RequestedSampling
from services.model_files.folder import reading, text_config
from services.router.config import RouterConfig
from services.router.learning.choice import why_left
from services.router.rules.facts import Facts
from services.router.rules.first_match import TriedRule, planned, tried_rules
from services.router.rules.rule_book import rules_of
from services.router.service import RouterService
from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, ServiceState, VerifierCard
from speculation.reloads import ReloadOrder
from speculation.types import Plan, SamplingDefaults

_CALL = "tenant=NAME, key=NAME, header.NAME=VALUE, open_requests=NUMBER or time=2026-11-25T23:30+01:00"
_FIELDS = ("sources", "strategy", "num_speculative_tokens", "effort", "drafter")
_LEARNT = "router.learning, while serving; auto until another is surely faster"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What becomes of a request.

    Attributes:
        passed: the rules up to the one that counts, each with why it was passed over.
        plan: what would be done.
        drafter: the name of the model that drafts; None: nobody names one.
        said_by: for each field of a plan that rules may set, who says it.
    """

    passed: tuple[TriedRule, ...]
    plan: Plan
    drafter: str | None
    said_by: dict[str, str]


class _NoVerifier:
    """Implements ``VerifierLink`` of a service that is not started: it says what would be served, and answers nothing."""

    def __init__(self, card: VerifierCard) -> None:
        self._card = card

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        raise Unavailable("nothing is started")

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        raise Unavailable("nothing is started")

    async def describe(self) -> VerifierCard:
        return self._card

    async def adapt(self, order: AdapterOrder) -> str:
        raise Unavailable("nothing is started")

    async def forget(self, tenant: str) -> None:
        raise Unavailable("nothing is started")

    async def reload(self, order: ReloadOrder) -> str:
        raise Unavailable("nothing is started")

    async def service_state(self) -> ServiceState:
        return ServiceState()


def explain(settings: Settings, file: Path, call: Sequence[str]) -> Explanation:
    """Plan the request in a file, a body of /v1/chat/completions or /v1/completions, without starting anything.

    Args:
        call: what else a rule may ask for, NAME=VALUE each.

    Raises:
        ConfigurationError: the file or the model cannot be read, or ``call`` is wrong.
        InvalidArgument: the request would be refused; names the field.
    """
    folder = model_folder(settings)
    if folder is None:
        raise ConfigurationError(
            "its tokenizer counts the prompt's tokens, so name a model that is here", field="model", value=settings.model
        )
    with reading(f"read {file}", about=file):
        body = parse_object(file.read_bytes())
    config = component_configs.router_config(settings, ResolvedModel(name=settings.model, path=folder))
    request, facts = asyncio.run(_asked(settings, config, folder, body, _called(call)))
    rules = rules_of(config)
    strategy = config.strategy.with_held(None).for_request(facts)
    plan, name = planned(rules, request, facts, strategy)
    rule = next((each for each in rules if each.name == name), None)
    said_by = {}
    for field in _FIELDS:
        own, usual = getattr(request, field) is not None, getattr(config.strategy, field, None) is not None
        by_rule = rule is not None and field in rule.sets and (rule.override or not own)
        said = f"the rule {name}" if by_rule else "the request" if own else f"router.{field}" if usual else "the strategy"
        said_by[field] = said
    if said_by["sources"] != "the strategy":
        # A list of sources is a blend.
        said_by["strategy"] = said_by["sources"]
    if config.learning.on and not name and not why_left(request, facts, strategy):
        said_by |= dict.fromkeys(("strategy", "effort"), _LEARNT)
    drafter = rule.applied(request).drafter if rule is not None else request.drafter
    passed = tuple(tried_rules(rules, request, facts, strategy))
    return Explanation(passed=passed, plan=plan, drafter=drafter, said_by=said_by)


async def _asked(
    settings: Settings, config: RouterConfig, folder: Path, body: dict[str, Any], called: dict[str, Any]
) -> tuple[ClientRequest, Facts]:
    """The request as a router would get it, and what its rules would see."""
    model, found = text_config(component_configs.read_model_config(folder)), generation_config(settings, folder)
    bounds = [settings.verifier.known_cache_tokens, model.get("max_position_embeddings")]
    longest = min((each for each in bounds if each is not None), default=0)
    card = VerifierCard(
        model=settings.model,
        max_model_len=settings.verifier.max_model_len or longest,
        vocab_size=model.get("vocab_size", 0),
        running=0,
        waiting=0,
        free_blocks=0,
        total_blocks=0,
        bit_exact=True,
        defaults=SamplingDefaults() if found is None else found.defaults,
    )
    router = RouterService(config, _NoVerifier(card))
    how = HowAsked(key=called.get("key", ""), headers=called["headers"])
    base = ClientRequest(input="", sampling=RequestedSampling(), tenant=called.get("tenant", ""), how=how)
    asked = read_chat(body) if "messages" in body else read_completion(body)

    async def at_once(check: Callable[[], Any]) -> Any:
        return check()

    served, fits, _ = await fitted(asked, router, at_once, strict=False)
    request = (await prepare(fits, served, router, base)).requests[0]
    facts = await router.facts(request)
    seen = {"open_requests": called.get("open_requests", 1), "at": called.get("time", facts.at)}
    return request, replace(facts, **seen)


def _called(call: Sequence[str]) -> dict[str, Any]:
    """What ``--call`` says, with all headers under one name."""
    found: dict[str, Any] = {"headers": {}}
    for entry in call:
        name, separator, value = entry.partition("=")
        try:
            if not separator:
                raise ValueError
            match name.partition("."):
                case "tenant" | "key", "", "":
                    found[name] = value
                case "header", ".", header if header:
                    found["headers"][header.lower()] = value
                case "open_requests", "", "":
                    found[name] = int(value)
                case "time", "", "":
                    at = datetime.fromisoformat(value)
                    found[name] = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
                case _:
                    raise ValueError
        except ValueError as error:
            raise ConfigurationError(field="--call", verb="", value=entry, allowed=_CALL) from error
    return found


def explanation_object(explained: Explanation) -> dict[str, Any]:
    """The explanation for other programs."""
    plan, passed = explained.plan, explained.passed
    return {
        "rules": [{"name": each.rule.name, "passed_over": each.why_not or None} for each in passed],
        "rule": next((each.rule.name for each in passed if each.plan is not None), None),
        "plan": {
            "strategy": plan.strategy,
            "sources": list(plan.sources),
            "num_speculative_tokens": plan.max_nodes,
            "effort": plan.effort,
            "drafter": explained.drafter,
            "acceptance": plan.acceptance,
        },
        "said_by": explained.said_by,
    }


def print_explanation(explained: Explanation, *, as_json: bool) -> None:
    """Print the rules that were looked at, and the plan."""
    if as_json:
        print(json.dumps(explanation_object(explained), indent=1))
        return
    console, plan = Console(), explained.plan
    if explained.passed:
        table = Table(title="Rules, in their order", title_justify="left")
        for column in ("rule", "counts", "why not"):
            table.add_column(column)
        for each in explained.passed:
            table.add_row(each.rule.name, "yes" if each.plan is not None else "no", each.why_not)
        console.print(table)
    if not any(each.plan is not None for each in explained.passed):
        console.print("No rule counts.")
    values = {
        "strategy": plan.strategy,
        "sources": ", ".join(plan.sources) or "none: plain decoding",
        "num_speculative_tokens": plan.max_nodes,
        "effort": plan.effort,
        "drafter": explained.drafter or "none is named",
    }
    table = Table(title="What would be done", title_justify="left")
    for column in ("field", "value", "said by"):
        table.add_column(column)
    for name, value in values.items():
        said = explained.said_by[name]
        # Which of a strategy's sources draft, follows from the index and the models that there are.
        by = f"{said}, and what is here" if (name, said) == ("sources", "the strategy") else said
        table.add_row(name, f"{value}", by)
    console.print(table)
