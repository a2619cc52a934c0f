"""The rules that count now. A file of them is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from services.api.messages import ClientRequest
from services.machine.followed_file import FollowedFile
from services.metrics.registry import DROPPED, Metrics
from services.router.config import RouterConfig
from services.router.rules.facts import Facts
from services.router.rules.first_match import planned
from services.router.rules.reading import NO_RULE, RULES_FILE, parse_rules, read_rules, read_rules_file
from services.router.rules.rule import Rule
from services.router.strategies import StrategyConfig
from speculation.errors import ConfigurationError
from speculation.types import Plan

log = logging.getLogger(__name__)


class RuleBook:
    """Plans requests by the rules of the settings, or of a file.

    Args:
        metrics: where it counts requests by rule, and how reloads end.
        clock: seconds, never going back.

    Raises:
        ConfigurationError: a rule is wrong. Once running, a wrong file is logged, and the old rules stay. They stay, too,
            while it cannot be read, which is tried again every second.
    """

    def __init__(
        self, config: RouterConfig, metrics: Metrics = DROPPED, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._strategy = config, config.strategy.with_held(None)
        self._matched = metrics.counter("router_rules_matched_total")
        reloads = metrics.counter("router_rules_reloads_total")
        self._followed: FollowedFile | None = None
        if (file := config.rules_file) is not None:
            self._followed = FollowedFile(
                file,
                "rules",
                RULES_FILE.most_bytes,
                lambda content: self._take(parse_rules(content, file, config.strategy)),
                lambda outcome: reloads.add(1, outcome),
                clock=clock,
            )
        self._rules = rules_of(config)

    def plan(self, request: ClientRequest, facts: Facts) -> tuple[Plan, str]:
        """The plan for a request, and the name of the rule that it is by; empty: none.

        Raises:
            InvalidArgument: the request cannot be planned; names the field.
        """
        if self._followed is not None:
            self._followed.look()
        plan, rule = planned(self._rules, request, facts, self._strategy.for_request(facts))
        self._matched.add(1, rule or NO_RULE)
        return plan, rule

    def follow(self, strategy: StrategyConfig) -> None:
        """Plan by what the server can do now. Rules that ask for more are passed over, which the log says."""
        self._strategy = strategy
        try:
            rules_of(replace(self._config, strategy=strategy))
        except ConfigurationError as error:
            log.warning("a rule is passed over: %s", error)

    def settle(self) -> None:
        """Wait until a changed file that has been noticed is read."""
        if self._followed is not None:
            self._followed.settle()

    def _take(self, rules: tuple[Rule, ...]) -> str:
        self._rules = rules
        return f"{len(rules)} rules count"


def rules_of(config: RouterConfig) -> tuple[Rule, ...]:
    """The rules of a router's settings, as they are now.

    Raises:
        ConfigurationError: one is wrong, or rules stand in the settings and in a file.
    """
    if config.rules_file is None:
        return read_rules(config.rules, "router.rules", config.strategy)
    if config.rules:
        raise ConfigurationError("set one of the two", field="router.rules and router.rules_file")
    return read_rules_file(config.rules_file, config.strategy)
