"""Writes docs/configuration.md from the declarations of the settings.

    python -m cluster.settings.reference > docs/configuration.md

A test checks that the page is fresh.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from cluster.settings.config import Settings
from cluster.settings.unknown import section_in
from services.patterns import WORDS

_HEAD = """# Settings

For operators: all settings. `python -m cluster.settings.reference > docs/configuration.md` made this page from their
declarations in the code.

A setting is given in a YAML file (`--config`), where sections are mappings; in the environment, such as
`OUTRIDER_VERIFIER__DTYPE=bfloat16`; or as a flag, such as `--set verifier.dtype=bfloat16`. A flag goes before the
environment, and that before the file. Unknown names are refused. `outrider plan` checks settings, and says what they start.
"""
# Defaults that the machine decides.
_ELSEWHERE = {"cache_dir": "`$XDG_CACHE_HOME/outrider`, else `~/.cache/outrider`"}
_KINDS = {"boolean": "bool", "integer": "int", "number": "float", "string": "str", "object": "mapping", "null": "null"}
_BOUNDS = {
    "minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "multipleOf": "a multiple of"
}  # fmt: skip


def page() -> str:
    """The page, as Markdown."""
    parts = [_HEAD, "## Of the whole service\n", _table(Settings, "")]
    for section, paths in _sections().items():
        about = " ".join((inspect.getdoc(section) or "").split()).replace("``", "`")
        # Components have such a section each.
        prefix = f"{paths[0]}." if len(paths) == 1 else f"*.{paths[0].rpartition('.')[2]}."
        parts += [f"## {', '.join(paths)}\n", f"{about}\n", _table(section, prefix)]
    return "\n".join(parts)


def settings_in(section: type[BaseModel]) -> Iterator[str]:
    """The names of a section's settings, without those that are sections and always there."""
    for name, field in section.model_fields.items():
        if section_in(field.annotation) is not field.annotation:
            yield name


def _sections(within: type[BaseModel] = Settings, prefix: str = "") -> dict[type[BaseModel], list[str]]:
    """The sections below a section, each with the paths that lead to it."""
    found: dict[type[BaseModel], list[str]] = {}
    for name, field in within.model_fields.items():
        if (section := section_in(field.annotation)) is not None:
            found.setdefault(section, []).append(f"{prefix}{name}")
            for below, paths in _sections(section, f"{prefix}{name}.").items():
                found.setdefault(below, []).extend(paths)
    return found


def _table(section: type[BaseModel], prefix: str) -> str:
    lines = ["| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    schemas = section.model_json_schema()["properties"]
    for name in settings_in(section):
        field, path = section.model_fields[name], f"{prefix}{name}"
        default = "must be set" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        cells = (
            f"`{path}`",
            _kind(schemas[name]),
            _ELSEWHERE.get(path, default),
            ", ".join(_allowed(schemas[name])),
            field.description or "",
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return "section"
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    return "path" if schema.get("format") == "path" else _KINDS[schema["type"]]


def _allowed(schema: dict[str, Any]) -> Iterator[str]:
    """The bounds of a value, or all that it may be."""
    for each in schema.get("anyOf", ()):
        yield from _allowed(each)
    yield from (f"`{value}`" for value in schema.get("enum", [schema["const"]] if "const" in schema else []))
    yield from (f"{sign} {schema[key]:.15g}" for key, sign in _BOUNDS.items() if key in schema)
    if "minLength" in schema:
        yield f"at least {schema['minLength']} characters"
    if "pattern" in schema:
        yield WORDS[schema["pattern"]]
    if "items" in schema:
        yield from (f"each {bound}" for bound in _allowed(schema["items"]))


def _shown(default: Any) -> str:
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default, default=str)}`"


if __name__ == "__main__":
    print(page(), end="")
