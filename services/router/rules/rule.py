"""A rule: what it asks of a request, and what it sets where that holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from services.api.messages import ClientRequest
from services.router.rules.conditions import Condition
from services.router.rules.facts import Facts
from speculation.types import Effort


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: what answers, logs and metrics call it.
        conditions: all of them must hold; none: it matches every request.
        strategy, sources, num_speculative_tokens, effort, drafter: what it sets, as in a request; None: it leaves
            that alone.
        override: it also replaces what a request says itself.
    """

    name: str
    conditions: tuple[Condition, ...] = ()
    strategy: str | None = None
    sources: tuple[str, ...] | None = None
    num_speculative_tokens: int | None = None
    effort: Effort | None = None
    drafter: str | None = None
    override: bool = False

    @property
    def sets(self) -> dict[str, Any]:
        """What it sets, by the names of a request's fields."""
        given = {
            "strategy": self.strategy,
            "sources": self.sources,
            "num_speculative_tokens": self.num_speculative_tokens,
            "effort": self.effort,
            "drafter": self.drafter,
        }
        return {name: value for name, value in given.items() if value is not None}

    def why_not(self, request: ClientRequest, facts: Facts) -> str:
        """Why it does not match a request, in words; empty: it does."""
        for condition in self.conditions:
            if not condition.holds(facts):
                return f"{condition.name} is {condition.found(facts)}, not {condition.wanted}"
        says_who = self.strategy is not None or self.sources is not None
        if says_who and not self.override and request.sources is not None:
            return f"the request names sources itself, {', '.join(request.sources)}"
        if says_who and not self.override and request.strategy is not None:
            return f"the request names a strategy itself, {request.strategy}"
        return ""

    def applied(self, request: ClientRequest) -> ClientRequest:
        """The request with what the rule sets, where the request does not say or the rule overrides it."""
        given = {name: value for name, value in self.sets.items() if self.override or getattr(request, name) is None}
        if given.keys() & {"strategy", "sources"}:
            # Who drafts is said by one of the two.
            given = {"strategy": None, "sources": None, **given}
        return replace(request, **given)
