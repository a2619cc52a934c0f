"""Which rule counts for a request: the first that matches it and can be honoured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.api.messages import ClientRequest
from services.router.plans import make_plan
from services.router.rules.facts import Facts
from services.router.rules.rule import Rule
from services.router.strategies import StrategyConfig, check_named
from speculation.errors import InvalidArgument
from speculation.types import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedRule:
    """What a rule comes to for a request.

    Attributes:
        why_not: why it was passed over; empty: it counts.
        plan: of the request by this rule; None: it was passed over.
    """

    rule: Rule
    why_not: str = ""
    plan: Plan | None = None


def tried_rules(rules: Sequence[Rule], request: ClientRequest, facts: Facts, config: StrategyConfig) -> Iterator[TriedRule]:
    """Those of the rules up to the one that counts, in their order.

    A rule that does not suit a request, such as one whose strategy does not draft from its prediction, is passed over: who
    sends the request knows nothing of the rule.
    """
    for rule in rules:
        if why := rule.why_not(request, facts):
            yield TriedRule(rule=rule, why_not=why)
            continue
        try:
            plan = make_plan(rule.applied(request), config)
        except InvalidArgument as error:
            yield TriedRule(rule=rule, why_not=f"{error}")
            continue
        yield TriedRule(rule=rule, plan=plan)
        return


def planned(rules: Sequence[Rule], request: ClientRequest, facts: Facts, config: StrategyConfig) -> tuple[Plan, str]:
    """The plan for a request, and the name of the rule that it is by; empty: none.

    Raises:
        InvalidArgument: the request cannot be planned; names the field.
    """
    # Also where a rule replaces it: what a request says is right or refused.
    check_named(request, config)
    for tried in tried_rules(rules, request, facts, config):
        if tried.plan is not None:
            return tried.plan, tried.rule.name
    return make_plan(request, config), ""
