"""Leaves out keywords of a JSON schema that change nothing: the grammar engine does not know all of them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

# Keywords whose values are schemas by name, lists of schemas, or schemas.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties")
# Characters of names and patterns that the engine is asked about: some ten milliseconds. Each pattern is compared with all
# names beside it, which in schemas of many of both would take minutes. A question takes as long as some hundred names.
_MOST_ASKED, _A_QUESTION = 32_768, 1024


class AskedPatterns:
    """What the engine may still be asked about patterns: ``left`` characters."""

    def __init__(self) -> None:
        self.left = _MOST_ASKED

    def take(self, pattern: str, names: dict[str, Any]) -> bool:
        """Whether it may be asked about this pattern, too."""
        if self.left > 0:
            self.left -= _A_QUESTION + len(pattern) + sum(map(len, names))
        return self.left > 0


def without_vacuous(schema: Any, asked: AskedPatterns | None = None) -> Any:
    """A schema with the same answers, without keywords that allow everything or concern nothing.

    ``propertyNames`` that every name satisfies; ``patternProperties`` for names that ``properties`` has all of: beside it,
    the engine would begin another name, and find none.

    Args:
        asked: for all schemas of one request: patterns are looked at until it is spent, the others stay.
    """
    return _without_vacuous(schema, AskedPatterns() if asked is None else asked)


def _without_vacuous(schema: Any, asked: AskedPatterns) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = {key: _below(key, value, asked) for key, value in schema.items()}
    if _allows_all(found.get("propertyNames")) or found.get("propertyNames") == {"type": "string"}:
        del found["propertyNames"]
    names, patterns = found.get("properties"), found.get("patternProperties")
    if isinstance(names, dict) and isinstance(patterns, dict):
        found["patternProperties"] = {
            pattern: below
            for pattern, below in patterns.items()
            if not _allows_all(below) or not _names_all(pattern, names, asked)
        }
        if not found["patternProperties"]:
            del found["patternProperties"]
    return found


def _allows_all(schema: Any) -> bool:
    return schema is True or schema == {}


def _below(key: str, value: Any, asked: AskedPatterns) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _without_vacuous(schema, asked) for name, schema in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [_without_vacuous(schema, asked) for schema in value]
    return _without_vacuous(value, asked) if key in _ALONE else value


def _names_all(pattern: str, names: dict[str, Any], asked: AskedPatterns) -> bool:
    """Whether every name that a pattern matches is one of ``names``; False where that is not known."""
    if not (names and pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith(r"\$")) or "/" in pattern:
        return False
    if not asked.take(pattern, names):
        return False
    known = " | ".join(json.dumps(name, ensure_ascii=False) for name in names)
    try:
        others = LLMatcher.grammar_from_lark(f"start: OTHER\nOTHER: /{pattern[1:-1]}/ & ~({known})")
    except ValueError:
        return False
    matcher = LLMatcher(_bytes(), others, log_level=0)
    # A mask of all 256 bytes; the end of the text comes after them.
    return not matcher.is_error() and not any(matcher.compute_bitmask()[:32]) and not matcher.is_accepting()


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
