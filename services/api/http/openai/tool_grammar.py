"""Grammars of answers that call tools, in Lark's notation.

Each tool's schema stays a root: its references (``$ref``, ``$defs``, ``$id``, ``#``) mean something else below another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from services.api.http.openai.errors import Refused
from services.api.http.openai.mark_rules import MarkRules, literal
from services.api.http.openai.tagged_grammar import tagged_rules
from services.structured_outputs.grammars import schema_rule
from services.structured_outputs.json_schemas import AskedPatterns
from services.tool_formats import harmony
from services.tool_formats.interface import CallShape, Slot, Step, json_object
from speculation.limits import MAX_GRAMMAR_CHARACTERS

# As much white space as in answers that follow a schema.
SPACE = r"space: /[\x20\x0A\x0D\x09]{1,20}/?"
TEXT = "TEXT: /(.|\\n)*/"


def listed_calls(schemas: Mapping[str, Any], *, several: bool) -> str:
    """A JSON list of calls, each an object with ``name`` and ``arguments``."""
    more = '(space "," space call)*' if several else ""
    rules = [f"call_{index}: {_sequence(json_object('arguments'), index, name)}" for index, name in enumerate(schemas)]
    begun = [f'start: "[" space call {more} space "]"', SPACE, _any_call(schemas), *rules]
    return _grammar(begun, _arguments(schemas))


def calls_in_text(
    schemas: Mapping[str, Any], strict: Mapping[str, str], shape: CallShape, marks: MarkRules, *, several: bool
) -> str:
    """Any text, with calls as a model writes them.

    Args:
        strict: tools whose calls must follow their schemas, and the fields that say so.
        several: text and further calls may follow a call; otherwise the answer ends there.

    Raises:
        Refused: no grammar holds such calls to a schema; names the field.
    """
    held = {name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()}
    between = "" if shape.between is None else f"({_sequence(shape.between)} call)*"
    before, after = _sequence(shape.before, marks=marks), _sequence(shape.after, marks=marks)
    if shape.first:
        begun = _beginning(shape, marks)
    else:
        answer = "(begun region)* TEXT" if several else "TEXT | begun region"
        begun = [f"start: {answer}", TEXT, *marks.until("begun", shape.opening)]
    begun += [f"region: {before} call {between if several else ''} {after}", _any_call(schemas), SPACE]
    begun += [f"call_{index}: {_sequence(shape.call, index, name, marks)}" for index, name in enumerate(schemas)]
    if shape.tags is None:
        return _grammar(begun, _arguments(held))
    asked, tags = AskedPatterns(), shape.tags
    tagged = (tagged_rules(index, schemas[name], strict.get(name), tags, marks, asked) for index, name in enumerate(schemas))
    return _grammar(begun, chain.from_iterable(tagged))


def calls_in_messages(schemas: Mapping[str, Any], strict: Mapping[str, str], marks: MarkRules) -> str:
    """Harmony's messages, the last of which is an answer, or one call."""
    held = {name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()}
    channel, message, constrain = (marks.mark(each) for each in (harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN))
    rules = [
        "start: said* (answer | call)",
        f'said: {channel} ("analysis" | "commentary") {message} said_end {marks.mark(harmony.START)} "assistant"',
        f'answer: {channel} "final" {message} TEXT',
        f'kind: " "? ({constrain}? "json")?',
        TEXT,
        *marks.until("said_end", harmony.END),
        _any_call(schemas),
    ]
    for index, name in enumerate(schemas):
        to = f"to=functions.{name}"
        head = f'{literal(f" {to}")} {channel} "commentary" | {channel} {literal(f"commentary {to}")}'
        rules.append(f"call_{index}: ({head}) kind {message} arguments_{index}")
    return _grammar(rules, _arguments(held))


def _grammar(begun: list[str], rules: Iterator[str]) -> str:
    """A grammar of these rules, the later of which are written as far as they are allowed to be.

    Raises:
        Refused: it is longer.
    """
    lines, length = begun, sum(len(rule) + 1 for rule in begun)
    for rule in rules:
        lines.append(rule)
        # Written on, it could be its length times itself: arguments between tags each repeat their tool's definitions.
        if (length := length + len(rule) + 1) > MAX_GRAMMAR_CHARACTERS:
            allowed = f"schemas whose grammar has at most {MAX_GRAMMAR_CHARACTERS} characters"
            raise Refused("tools", f"more than {length} characters", allowed)
    return "\n".join(lines)


def _beginning(shape: CallShape, marks: MarkRules) -> list[str]:
    """Rules for an answer that is nothing but calls, or text that does not begin like one."""
    others = "{" if marks.is_special(shape.opening) else "{" + shape.opening[0]
    return [f"start: OTHER | {marks.mark(shape.opening)}? region", f"OTHER: /\\s*([^{others}\\s](.|\\n)*)?/"]


def _any_call(schemas: Mapping[str, Any]) -> str:
    return f"call: {' | '.join(f'call_{index}' for index in range(len(schemas)))}"


def _arguments(schemas: Mapping[str, Any]) -> Iterator[str]:
    asked = AskedPatterns()
    return (f"arguments_{index}: {schema_rule(schema, asked)}" for index, schema in enumerate(schemas.values()))


def _sequence(steps: tuple[Step, ...], index: int = 0, name: str = "", marks: MarkRules | None = None) -> str:
    slots = {
        Slot.SPACE: "space",
        Slot.NAME: literal(name),
        Slot.QUOTED_NAME: literal(json.dumps(name)),
        Slot.NUMBER: "/[0-9]+/",
        Slot.ARGUMENTS: f"arguments_{index}",
        Slot.TAGGED: f"tagged_{index}",
    }
    written = (
        slots[step] if isinstance(step, Slot) else literal(step) if marks is None else marks.mark(step) for step in steps
    )
    return " ".join(written)
