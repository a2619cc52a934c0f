"""Grammars of answers that call tools, in Lark's notation.

Each tool's schema stays a root: its references (``$ref``, ``$defs``, ``$id``, ``#``) mean something else below another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.json_schemas import without_vacuous

# As much white space as in answers that follow a schema.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"


def listed_calls(schemas: Mapping[str, Any], *, several: bool) -> str:
    """A JSON list of calls, each an object with ``name`` and ``arguments``."""
    more = '(space "," space call)*' if several else ""
    return f'start: "[" space call {more} space "]"\n{_call_of(schemas)}'


def enveloped_calls(schemas: Mapping[str, Any], opening: str, closing: str, *, several: bool) -> str:
    """Any text, in which each ``opening`` begins a call that ``closing`` ends.

    Args:
        several: text and further calls may follow a call; otherwise the answer ends there.
    """
    answer = "(begun enveloped)* TEXT" if several else "TEXT | begun enveloped"
    return (
        f"start: {answer}\n"
        "TEXT: /(.|\\n)*/\n"
        f"begun[lazy]: TEXT {_literal(opening)}\n"
        f"enveloped: space call space {_literal(closing)}\n"
        f"{_call_of(schemas)}"
    )


def _call_of(schemas: Mapping[str, Any]) -> str:
    rules = [f"space: /{_WHITE_SPACE}/?", f"call: {' | '.join(f'call_{index}' for index in range(len(schemas)))}"]
    for index, (name, schema) in enumerate(schemas.items()):
        named = f'"{{" space "\\"name\\"" space ":" space {_literal(_text(name))} space ","'
        rules.append(f'call_{index}: {named} space "\\"arguments\\"" space ":" space arguments_{index} space "}}"')
        rules.append(f"arguments_{index}: %json {_text(_with_options(schema))}")
    return "\n".join(rules)


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    schema = without_vacuous(schema)
    own = schema.get("x-guidance")
    if isinstance(own, dict) and own.get("whitespace_flexible") is False:
        return {**schema, "x-guidance": {**own, "lenient": False}}
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE, **(own or {}), "lenient": False}}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
