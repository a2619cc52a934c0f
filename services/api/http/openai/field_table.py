"""Every field of a request's body, and what becomes of it: honoured, without effect, or refused. Printed for the docs by
``python -m services.api.http.openai.field_table``.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from services.api.http.declared import schema_of
from services.api.http.openai import field_rules, other_servers
from services.api.http.openai.protocol.chat_body import ChatBody
from services.api.http.openai.protocol.completion_body import CompletionBody
from services.api.http.openai.protocol.marks import Effect, declared_fields, effect_of
from services.api.http.openai.protocol.token_bodies import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
# Fields of a generation; a query that names one is refused, since it is said in the wrong place. Those of other servers
# (HINTS) ask for nothing there.
KNOWN = frozenset(name for body in (ChatBody, CompletionBody) for name, _ in declared_fields(body))
# Bounds beyond which a range says that any number will do.
_WIDE = 1 << 30
_EFFECTS: tuple[Effect, ...] = ("honoured", "without effect", "refused")


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# Fields of OpenAI's API",
        "",
        "For those who write requests. Made from the code: "
        "`python -m services.api.http.openai.field_table > docs/openai_fields.md`.",
        "",
        "A field is honoured, or has no effect (no value that is taken could change the answer), or is refused by name. "
        "null is unset. Fields that are not here are refused, too. Embeddings, reranking, audio, images and beam search are "
        "not served. /openapi.json of a running service says the same to programs, and /docs to browsers.",
    ]
    for path, body in BODIES.items():
        lines += ["", f"## {path}", "", "| field | here | takes | meaning |", "|---|---|---|---|"]
        lines += _rows(body)
    lines += [
        "",
        "## Of other servers",
        "",
        "Values that ask for nothing are taken, such as `mirostat: 0` or `return_tokens: false`, and null of each. What is "
        "left out is named in x-outrider-ignored, or refused with `server.unknown_fields: refuse`.",
        "",
        "| field | here | instead |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {other_servers.told_of(name)} | {hint} |" for name, hint in sorted(field_rules.HINTS.items())]
    return "\n".join(lines) + "\n"


def _rows(body: type[BaseModel]) -> list[str]:
    schema = schema_of(body)
    rows = sorted((_EFFECTS.index(effect_of(field)), name, field) for name, field in declared_fields(body))
    return [
        f"| `{name}` | {_EFFECTS[effect]} | {_kind(schema['properties'][name], schema)} | {field.description or ''} |"
        for effect, name, field in rows
    ]


def _kind(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """A type with its bounds, in words."""
    if "$ref" in schema:
        found = root["$defs"][schema["$ref"].rpartition("/")[2]]
        return "object: " + ", ".join(
            name
            for name, each in found["properties"].items()
            if each.keys() - {"description", "x-effect"} and each.get("type") != "null"
        )
    if "anyOf" in schema:
        kinds = [_kind(each, root) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        return ", ".join(json.dumps(each).strip('"') for each in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind in ("integer", "number"):
        return f"{kind}{_span(schema)}"
    if kind == "array":
        return f"list of {_kind(schema['items'], root)}" if schema.get("maxItems") != 0 else "an empty list"
    return {"string": "text", "boolean": "true, false", "null": ""}.get(str(kind), str(kind))


def _span(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None or high is None or low < -_WIDE:
        return ""
    return f" {low:g} to {high:g}" if high < _WIDE else f" from {low:g}"


if __name__ == "__main__":
    print(page(), end="")
