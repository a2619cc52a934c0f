"""JSON schemas of declared objects, as JSON Schema 2020-12 and so OpenAPI 3.1 have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

# Where OpenAPI keeps schemas.
_PLACE = "#/components/schemas/{model}"
# Bounds of numbers that are turned into another type first: pydantic leaves them under its own names.
_BOUNDS: dict[str, str] = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one object; those within it are in its ``$defs``."""
    tidied: dict[str, Any] = _tidied(model.model_json_schema())
    return tidied


def schemas_of(models: Sequence[type[BaseModel]]) -> tuple[dict[type[BaseModel], Any], dict[str, Any]]:
    """Where the schema of each object is, and all of them, with those of objects within, by their names."""
    places, found = models_json_schema([(model, "validation") for model in models], ref_template=_PLACE)
    return {model: places[model, "validation"] for model in models}, _tidied(found["$defs"])


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
