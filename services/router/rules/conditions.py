"""The conditions that a rule may have: how each is written, and whether it holds of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from zoneinfo import ZoneInfo

import re2

from services.api.told_headers import SECRET_HEADERS
from services.router.rules.facts import Facts
from services.router.rules.fields import Field
from speculation.errors import spelled

Holds = Callable[[Facts], bool]
# Of a regular expression; bytes that RE2 may use for one; and characters of a system prompt that are searched.
_MOST_PATTERN, _PATTERN_BYTES, _SEARCHED = 1000, 1 << 20, 16_384
_LARGEST = 2**31 - 1
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a rule.

    Attributes:
        name: as the rule calls it.
        wanted: its value, as the rule has it.
        holds: whether a request satisfies it.
        found: what a request has instead, for who reads an explanation.
    """

    name: str
    wanted: str
    holds: Holds
    found: Callable[[Facts], str]


def read_conditions(when: Field) -> tuple[Condition, ...]:
    """A rule's conditions.

    Raises:
        ConfigurationError: one is unknown or wrong; names it.
    """
    return tuple(
        Condition(name, _shown(field.value), _READERS[name](field), _FOUND.get(name, _attribute(name)))
        for name, field in when.below(tuple(_READERS)).items()
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _names(field: Field) -> Holds:
    names, fact = field.texts(), field.name.rpartition(".")[2]
    return lambda facts: getattr(facts, fact) in names


def _truth(field: Field) -> Holds:
    wanted, fact = field.truth(), field.name.rpartition(".")[2]
    return lambda facts: getattr(facts, fact) is wanted


def _span(field: Field) -> Holds:
    fact, bounds = field.name.rpartition(".")[2], field.below(("min", "max"))
    low = bounds["min"].whole(0, _LARGEST) if "min" in bounds else 0
    high = bounds["max"].whole(low, _LARGEST) if "max" in bounds else _LARGEST
    if not bounds:
        field.refuse("a mapping with min, max or both")
    return lambda facts: low <= getattr(facts, fact) <= high


def _header(field: Field) -> Holds:
    wanted = {}
    for name, below in _named(field).items():
        if name.lower() in SECRET_HEADERS:
            below.refuse("left out: it proves who somebody is; ask for tenant or key")
        wanted[name.lower()] = below.texts()
    return lambda facts: _has(facts.headers, wanted)


def _metadata(field: Field) -> Holds:
    wanted = {name: below.texts() for name, below in _named(field).items()}
    return lambda facts: _has(facts.metadata, wanted)


def _named(field: Field) -> dict[str, Field]:
    return field.entries() or field.refuse("a mapping of at least one name to texts")


def _has(given: Mapping[str, str], wanted: Mapping[str, tuple[str, ...]]) -> bool:
    return all(given.get(name) in texts for name, texts in wanted.items())


def _time(field: Field) -> Holds:
    parts = field.below(("from", "to", "zone"))
    if not {"from", "to"} <= parts.keys():
        field.refuse("a mapping with from and to")
    begin, end = _minute(parts["from"]), _minute(parts["to"])
    zone = _zone(parts["zone"]) if "zone" in parts else UTC
    if begin == end:
        parts["to"].refuse("another time than from")

    def holds(facts: Facts) -> bool:
        now = facts.at.astimezone(zone)
        return (60 * now.hour + now.minute - begin) % _MINUTES < (end - begin) % _MINUTES

    return holds


def _minute(field: Field) -> int:
    value = field.value
    # YAML reads 22:00 as sixty times 22.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MINUTES:
        return value
    found = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        field.refuse('a time of day from "00:00" to "23:59"')
    return 60 * int(found[1]) + int(found[2])


def _zone(field: Field) -> ZoneInfo:
    try:
        return ZoneInfo(field.text())
    except (KeyError, ValueError, OSError):
        field.refuse("the name of a time zone that this machine knows, such as Europe/Berlin")


def _pattern(field: Field) -> Holds:
    options = re2.Options()
    options.max_mem, options.log_errors = _PATTERN_BYTES, False
    try:
        found = re2.compile(field.text(_MOST_PATTERN), options)
    except re2.error as error:
        said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else f"{error.args[0]}"
        field.refuse(f"a regular expression as RE2 has it, which takes linear time ({said})")
    return lambda facts: found.search(facts.system_prompt[:_SEARCHED]) is not None


def _attribute(name: str) -> Callable[[Facts], str]:
    return lambda facts: spelled(getattr(facts, name))


_READERS: Mapping[str, Callable[[Field], Holds]] = {
    "tenant": _names,
    "key": _names,
    "model": _names,
    "prompt_tokens": _span,
    "sampled": _truth,
    "grammar": _truth,
    "prediction": _truth,
    "tools": _truth,
    "open_requests": _span,
    "time": _time,
    "header": _header,
    "metadata": _metadata,
    "system_prompt": _pattern,
}
_FOUND: Mapping[str, Callable[[Facts], str]] = {
    "time": lambda facts: f"{facts.at:%H:%M %Z}",
    "header": lambda facts: f"{dict(facts.headers)}",
    "system_prompt": lambda facts: f"{len(facts.system_prompt)} characters without a match",
}
