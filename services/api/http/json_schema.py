"""JSON schemas of declared objects, as JSON Schema 2020-12 and so OpenAPI 3.1 have them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

# Where OpenAPI keeps schemas.
PLACE = "#/components/schemas/{model}"
# Bounds of numbers that are turned into another type first: pydantic leaves them under its own names.
_BOUNDS: dict[str, str] = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one object; those within it are in its ``$defs``."""
    tidied: dict[str, Any] = _tidied(model.model_json_schema())
    return tidied


def schemas_of(models: list[type[BaseModel]]) -> dict[str, Any]:
    """The schemas of objects and of those within them, by their names."""
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=PLACE)
    tidied: dict[str, Any] = _tidied(found["$defs"])
    return tidied


def _tidied(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            kept[key] = {name: _tidied(each) for name, each in value.items()}
        elif not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None):
            kept[_BOUNDS.get(str(key), str(key))] = _tidied(value)
    return kept
