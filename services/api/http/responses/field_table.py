"""Every field of a request to the Responses API, and what becomes of it, for the docs: printed by
``python -m services.api.http.responses.field_table``.
"""

from __future__ import annotations

import json
from typing import Any

from services.api.http.harmless import never
from services.api.http.responses.protocol import CreateResponse
from services.api.http.responses.unserved import UNSERVED

_OF_MODELS = {"integer": "whole number", "string": "text", "boolean": "true, false", "array": "list"}


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# Fields of the Responses API",
        "",
        "For those who write requests. Made from the code: "
        "`python -m services.api.http.responses.field_table > docs/responses_fields.md`.",
        "",
        "A field is taken, or refused by name. null is unset. Fields that are not here are refused, too.",
        "",
        "| field | here | takes | meaning |",
        "|---|---|---|---|",
    ]
    properties = CreateResponse.model_json_schema()["properties"]
    for name, field in sorted(properties.items()):
        lines.append(f"| `{name}` | taken | {_kind(field)} | {field.get('description', '')} |")
    for name, (harmless, allowed) in sorted(UNSERVED.items()):
        lines.append(f"| `{name}` | {'refused' if harmless is never else 'only harmless'} | | {allowed} |")
    return "\n".join(lines) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "$ref" in schema:
        return "object"
    if "const" in schema or "enum" in schema:
        return ", ".join(json.dumps(each).strip('"') for each in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    return _OF_MODELS.get(kind, kind)


if __name__ == "__main__":
    print(page(), end="")
