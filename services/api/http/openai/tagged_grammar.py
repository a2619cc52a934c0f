"""Rules of a grammar for arguments that stand one by one between tags."""

from __future__ import annotations

from typing import Any

from services.api.http.openai.errors import Refused
from services.api.http.openai.mark_rules import MarkRules, literal
from services.structured_outputs.grammars import schema_rule
from services.tool_formats.interface import Tags, argument_schema
from services.tool_formats.tagged import kinds_of

_DEFINITIONS = ("$defs", "definitions")
_SAYINGS = ("description", "title", "default", "examples", "$schema", "$comment", "deprecated")
# Of a tool's schema: what the rules keep to. No other arguments than its properties are written.
_OF_OBJECTS = (*_DEFINITIONS, *_SAYINGS, "type", "properties", "required", "additionalProperties")
# Types that a text may be read as, beside being a text.
_PLAIN = {"string", "null", "integer", "number", "boolean"}


def tagged_rules(index: int, schema: Any, field: str | None, tags: Tags, marks: MarkRules) -> list[str]:
    """The rules ``tagged_INDEX`` consists of.

    Args:
        field: of the request, which says that arguments must follow ``schema``; None: they need not.

    Raises:
        Refused: no rules hold them to it; names the field.
    """
    rules = marks.until(f"value_{index}", tags.after_value)
    if field is None:
        key = f"{marks.mark(tags.before_key)} /[^<>\\n]{{1,256}}/ {_joined(tags.between, marks)}"
        return [f"tagged_{index}: ({key} value_{index} space)*", *rules]
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise _no_rules(field, "a schema of another type than object")
    if unknown := sorted({*schema} - {*_OF_OBJECTS}):
        raise _no_rules(field, f"{unknown[0]} of a tool's schema")
    if not {*required} <= {*properties}:
        raise _no_rules(field, "a required argument that is not among the properties")
    steps = []
    for number, key in enumerate(properties):
        before = f"{marks.mark(tags.before_key)} {literal(key)} {_joined(tags.between, marks)}"
        value = _value(schema, key, field)
        ended = f"{value} space {marks.mark(tags.after_value)}" if value else f"value_{index}"
        rules.append(f"argument_{index}_{number}: {before} {ended} space")
        steps.append(f"argument_{index}_{number}{'' if key in required else '?'}")
    return [f"tagged_{index}: {' '.join(steps)}".rstrip() + ("" if steps else ' ""'), *rules]


def _value(schema: dict[str, Any], key: str, field: str) -> str:
    """A value's rule; empty: any text."""
    own = argument_schema(schema, key)
    kinds = kinds_of(own)
    if not kinds:
        raise _no_rules(field, f"an argument, {key}, whose schema does not say its type")
    if "string" not in kinds:
        below = {name: schema[name] for name in _DEFINITIONS if name in schema}
        return schema_rule({**below, **own})
    words = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return f"({' | '.join(map(literal, words))})"
    if kinds <= _PLAIN and all({*part} <= {*_SAYINGS, "type"} for part in _parts(own)):
        return ""
    raise _no_rules(field, f"more of the text {key} than its type or its words")


def _parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    listed = schema.get("anyOf") or schema.get("oneOf")
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
    return [rest, *(part for part in listed or () if isinstance(part, dict))]


def _joined(texts: tuple[str, ...], marks: MarkRules) -> str:
    return " ".join(map(marks.mark, texts))


def _no_rules(field: str, what: str) -> Refused:
    allowed = f"unset: this model writes arguments between tags, where no grammar holds them to {what}"
    return Refused(field, True, allowed, "unsupported_value")
