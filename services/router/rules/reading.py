"""Reads rules, from settings or from a file: a YAML list of mappings with ``name``, ``when``, ``set`` and ``override``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from services.router.rules.conditions import read_conditions
from services.router.rules.fields import Field
from services.router.rules.rule import Rule
from services.router.strategies import StrategyConfig, listed_sources, served
from services.yaml_text import read_yaml
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.sources import BLEND
from speculation.types import Effort

MOST_BYTES = 1 << 20
_MOST_RULES = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What answers without a rule are counted under.
NO_RULE = "none"
_SETS = ("strategy", "sources", "num_speculative_tokens", "effort", "drafter")


def read_rules_file(path: Path, config: StrategyConfig) -> tuple[Rule, ...]:
    """The rules in a file.

    Raises:
        ConfigurationError: it cannot be read, or a rule is wrong; names file, rule and field.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot be read ({error.strerror})", field="router.rules_file", value=path) from error
    return parse_rules(content, path, config)


def parse_rules(content: bytes, path: Path, config: StrategyConfig) -> tuple[Rule, ...]:
    """The rules in the content of a file.

    Args:
        path: of the file, for the error.
        config: which strategies are served.

    Raises:
        ConfigurationError: a rule is wrong; names file, rule and field.
    """
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"larger than {MOST_BYTES >> 20} MiB", field="router.rules_file", value=path)
    try:
        entries = read_yaml(content.decode("utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{error}", field="router.rules_file", value=path) from error
    if not isinstance(entries, list):
        raise ConfigurationError(field="router.rules_file", value=path, allowed="a list of rules; an empty one is []")
    return read_rules(entries, f"{path}", config)


def read_rules(entries: Sequence[object], where: str, config: StrategyConfig) -> tuple[Rule, ...]:
    """Rules that have been read as mappings.

    Raises:
        ConfigurationError: there are too many, two have one name, or one is wrong; names rule and field.
    """
    if len(entries) > _MOST_RULES:
        raise ConfigurationError(field=where, value=f"{len(entries)} rules", allowed=f"at most {_MOST_RULES} rules")
    rules: dict[str, Rule] = {}
    for number, entry in enumerate(entries, 1):
        field = Field(f"{where}, rule {number}", "", entry)
        rule = _read(field, config)
        if rule.name in rules:
            field.under("name", rule.name).refuse("a name that no other rule has")
        rules[rule.name] = rule
    return tuple(rules.values())


def _read(entry: Field, config: StrategyConfig) -> Rule:
    parts = entry.below(("name", "when", "set", "override"))
    name = parts.get("name", entry.under("name", None))
    if not isinstance(name.value, str) or not _NAME.fullmatch(name.value) or name.value == NO_RULE:
        name.refuse(f"1 to 64 of the characters A-Z a-z 0-9 . _ -, beginning with a letter or digit, and not {NO_RULE}")
    sets = parts.get("set", entry.under("set", None)).below(_SETS)
    strategies = tuple(sorted(served(config)))
    nodes, effort = sets.get("num_speculative_tokens"), sets.get("effort")
    return Rule(
        name=name.value,
        conditions=read_conditions(parts["when"]) if "when" in parts else (),
        strategy=sets["strategy"].one_of(strategies) if "strategy" in sets else None,
        sources=_sources(sets["sources"], sets.get("strategy"), config) if "sources" in sets else None,
        num_speculative_tokens=None if nodes is None else nodes.whole(0, limits.MAX_TREE_NODES),
        effort=None if effort is None else cast(Effort, effort.one_of(get_args(Effort))),
        drafter=_drafter(sets["drafter"], config) if "drafter" in sets else None,
        override=parts["override"].truth() if "override" in parts else False,
    )


def _sources(field: Field, strategy: Field | None, config: StrategyConfig) -> tuple[str, ...]:
    names = field.texts()
    if strategy is not None and strategy.value != BLEND:
        field.refuse(f"left out where strategy is set and is not {BLEND}")
    try:
        listed_sources(names, config)
    except InvalidArgument as error:
        Field(field.where, field.name, error.value).refuse(error.allowed)
    return names


def _drafter(field: Field, config: StrategyConfig) -> str:
    if config.registers:
        return field.text()
    names = tuple(each.name for each in config.trained)
    return field.one_of(names) if names else field.refuse("left out: no model drafts here")
