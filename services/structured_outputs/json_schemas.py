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


def without_vacuous(schema: Any) -> Any:
    """A schema with the same answers, without keywords that allow everything or concern nothing.

    ``propertyNames`` that every name satisfies; ``patternProperties`` for names that ``properties`` has all of: beside it,
    the engine would begin another name, and find none.
    """
    if not isinstance(schema, dict):
        return schema
    found = {key: _below(key, value) for key, value in schema.items()}
    if _allows_all(found.get("propertyNames")) or found.get("propertyNames") == {"type": "string"}:
        del found["propertyNames"]
    names, patterns = found.get("properties"), found.get("patternProperties")
    if isinstance(names, dict) and isinstance(patterns, dict):
        found["patternProperties"] = {
            pattern: below for pattern, below in patterns.items() if not _allows_all(below) or not _names_all(pattern, names)
        }
        if not found["patternProperties"]:
            del found["patternProperties"]
    return found


def _allows_all(schema: Any) -> bool:
    return schema is True or schema == {}


def _below(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: without_vacuous(schema) for name, schema in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [without_vacuous(schema) for schema in value]
    return without_vacuous(value) if key in _ALONE else value


def _names_all(pattern: str, names: dict[str, Any]) -> bool:
    """Whether every name that a pattern matches is one of ``names``; False where that is not known."""
    if not (names and pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith(r"\$")) or "/" in pattern:
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
