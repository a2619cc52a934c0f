"""Rules of a grammar for arguments that stand one by one between tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.api.http.openai.errors import Refused
from services.api.http.openai.mark_rules import MarkRules, literal
from services.structured_outputs.grammars import schema_rule
from services.structured_outputs.json_schemas import AskedPatterns
from services.tool_formats.interface import Tags, argument_schema
from services.tool_formats.tagged import kinds_of

_DEFINITIONS = ("$defs", "definitions")
_SAYINGS = ("description", "title", "default", "examples", "$schema", "$comment", "deprecated")
# Of a tool's schema: what the rules keep to. No other arguments than its properties are written.
_OF_OBJECTS = (*_DEFINITIONS, *_SAYINGS, "type", "properties", "required", "additionalProperties")
# Types that a text may be read as, beside being a text.
_PLAIN = {"string", "null", "integer", "number", "boolean"}


def tagged_rules(
    index: int, schema: Any, field: str | None, tags: Tags, marks: MarkRules, asked: AskedPatterns
) -> Iterator[str]:
    """The rules ``tagged_INDEX`` consists of.

    Args:
        field: of the request, which says that arguments must follow ``schema``; None: they need not.

    Raises:
        Refused: no rules hold them to it; names the field.
    """
    if field is None:
        key = f"{marks.mark(tags.before_key)} /[^<>\\n]{{1,256}}/ {_joined(tags.between, marks)}"
        yield f"tagged_{index}: ({key} value_{index} space)*"
        yield from marks.until(f"value_{index}", tags.after_value)
        return
    properties, required = _properties(schema, field)
    steps = [f"argument_{index}_{number}{'' if key in required else '?'}" for number, key in enumerate(properties)]
    yield f"tagged_{index}: {' '.join(steps)}".rstrip() + ("" if steps else ' ""')
    yield from marks.until(f"value_{index}", tags.after_value)
    for number, key in enumerate(properties):
        before = f"{marks.mark(tags.before_key)} {literal(key)} {_joined(tags.between, marks)}"
        value = _value(schema, key, field, asked)
        ended = f"{value} space {marks.mark(tags.after_value)}" if value else f"value_{index}"
        yield f"argument_{index}_{number}: {before} {ended} space"


def _properties(schema: dict[str, Any], field: str) -> tuple[dict[str, Any], frozenset[str]]:
    """A tool's arguments, and those of them that each call has."""
    properties = schema.get("properties") or {}
    listed = schema.get("required") or ()
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise _no_rules(field, "a schema of another type than object")
    if unknown := sorted({*schema} - {*_OF_OBJECTS}):
        raise _no_rules(field, f"{unknown[0]} of a tool's schema")
    if not isinstance(listed, list | tuple) or not all(isinstance(key, str) for key in listed):
        raise _no_rules(field, "required arguments other than a list of names")
    required = frozenset(listed)
    if not required <= {*properties}:
        raise _no_rules(field, "a required argument that is not among the properties")
    return properties, required


def _value(schema: dict[str, Any], key: str, field: str, asked: AskedPatterns) -> str:
    """A value's rule; empty: any text."""
    own = argument_schema(schema, key)
    kinds = kinds_of(own)
    if not kinds:
        raise _no_rules(field, f"an argument, {key}, whose schema does not say its type")
    if "string" not in kinds:
        below = {name: schema[name] for name in _DEFINITIONS if name in schema}
        return schema_rule({**below, **own}, asked)
    words = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return f"({' | '.join(map(literal, words))})"
    if kinds <= _PLAIN and all(isinstance(part, dict) and {*part} <= {*_SAYINGS, "type"} for part in _parts(own)):
        return ""
    raise _no_rules(field, f"more of the text {key} than its type or its words")


def _parts(schema: dict[str, Any]) -> list[Any]:
    """A schema without its alternatives, and each of those."""
    choices = [name for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    rest = {name: value for name, value in schema.items() if name not in choices}
    return [rest, *(part for name in choices for part in schema[name])]


def _joined(texts: tuple[str, ...], marks: MarkRules) -> str:
    return " ".join(map(marks.mark, texts))


def _no_rules(field: str, what: str) -> Refused:
    allowed = f"unset: this model writes arguments between tags, where no grammar holds them to {what}"
    return Refused(field, True, allowed, "unsupported_value")
