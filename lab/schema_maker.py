"""JSON schemas of the kind that people ask for: nested objects, lists, maps, tuples, enumerations, patterns, alternatives.

Their shapes follow JSONSchemaBench (https://arxiv.org/abs/2501.10868): function calls, configuration files, API records,
with definitions that are referred to, also by themselves. All are drawn from a seed, and every keyword is one that a
constrained server is expected to honour.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_SUBJECTS: dict[str, tuple[str, ...]] = {
    "customer": ("first_name", "last_name", "email", "phone", "address", "loyalty_level", "notes"),
    "product": ("name", "sku", "category", "price", "currency", "in_stock", "dimensions", "tags"),
    "weather_report": ("city", "temperature", "unit", "humidity", "conditions", "forecast"),
    "calendar_event": ("title", "starts_at", "ends_at", "location", "attendees", "recurring", "priority"),
    "recipe": ("title", "servings", "ingredients", "steps", "difficulty", "cooking_time_minutes"),
    "server_config": ("hostname", "port", "protocol", "log_level", "retries", "timeouts", "features"),
    "book": ("title", "author", "isbn", "genre", "pages", "published_on", "reviews"),
    "payment": ("order_id", "amount", "currency", "method", "status", "created_at", "items"),
    "support_ticket": ("subject", "severity", "status", "assignee", "description", "labels"),
    "robot_command": ("action", "target", "speed", "coordinates", "repeat", "safety_checks"),
}
_WORDS = ("low", "medium", "high", "open", "closed", "pending", "draft", "active", "archived", "unknown", "daily", "weekly")
_PATTERNS = (
    r"^[A-Z]{3}-[0-9]{4}$",
    r"^[a-z0-9_]{3,12}$",
    r"^\+[0-9]{6,12}$",
    r"^#[0-9a-f]{6}$",
    r"^v[0-9]+\.[0-9]+\.[0-9]+$",
)
_FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "hostname")
# Definitions that a schema may refer to; the last one refers to itself.
_DEFINITIONS: dict[str, Schema] = {
    "money": {
        "type": "object",
        "properties": {"amount": {"type": "integer", "minimum": 0}, "currency": {"enum": ["EUR", "USD", "JPY"]}},
        "required": ["amount", "currency"],
        "additionalProperties": False,
    },
    "period": {
        "type": "object",
        "properties": {"from": {"type": "string", "format": "date"}, "to": {"type": "string", "format": "date"}},
        "required": ["from"],
        "additionalProperties": False,
    },
    "part": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "parts": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/part"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
}


def make_schema(seed: int) -> Schema:
    """The schema of number ``seed``: always the same."""
    source = random.Random(seed)
    subject = source.choice(sorted(_SUBJECTS))
    made = {"title": subject, "description": f"One {subject.replace('_', ' ')}."}
    made |= _object(source, list(_SUBJECTS[subject]), depth=0)
    used = {name: kind for name, kind in _DEFINITIONS.items() if f"#/$defs/{name}" in str(made)}
    return {**made, "$defs": used} if used else made


def _object(source: random.Random, names: list[str], depth: int) -> Schema:
    source.shuffle(names)
    names = names[: source.randint(2, 6 if depth == 0 else 3)]
    required = sorted(name for name in names if source.random() < 0.8) or names[:1]
    return {
        "type": "object",
        "properties": {name: _value(source, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _value(source: random.Random, depth: int) -> Schema:
    nested: list[Callable[[], Schema]] = [
        lambda: _object(source, ["id", "name", "kind", "value", "unit", "note"], depth),
        lambda: {"type": "array", "items": _value(source, depth + 1), **_counts(source)},
        lambda: {"anyOf": [_leaf(source), {"type": "null"}]},
        lambda: {"anyOf": [_leaf(source), _object(source, ["id", "label", "reason"], depth)]},
        lambda: {"type": "object", "additionalProperties": _leaf(source)},
        lambda: {
            "type": "array", "prefixItems": [_leaf(source), _leaf(source)], "items": False, "minItems": 2, "maxItems": 2
        },
        lambda: {"$ref": f"#/$defs/{source.choice(sorted(_DEFINITIONS))}"},
        lambda: _tagged(source),
    ]  # fmt: skip
    return source.choice(nested)() if depth < 3 and source.random() < 0.4 else _leaf(source)


def _tagged(source: random.Random) -> Schema:
    """One of two objects, told apart by a constant."""
    kinds = source.sample(_WORDS, 2)
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": _leaf(source)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in kinds
        ]
    }


def _counts(source: random.Random) -> Schema:
    least = source.randint(0, 2)
    return {"minItems": least, "maxItems": least + source.randint(1, 3)}


def _leaf(source: random.Random) -> Schema:
    leaves: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "maxLength": source.choice((24, 40, 80))},
        lambda: {"enum": source.sample(_WORDS, source.randint(2, 5))},
        lambda: {"type": "integer", "minimum": source.randint(-10, 1), "maximum": source.choice((10, 100, 65535))},
        lambda: {"type": "number", "minimum": 0, "maximum": source.choice((1, 100, 5000))},
        lambda: {"type": "boolean"},
        lambda: {"type": "string", "pattern": source.choice(_PATTERNS)},
        lambda: {"type": "string", "format": source.choice(_FORMATS)},
        lambda: {"const": source.choice(_WORDS)},
        lambda: {"type": "string", "minLength": 3, "maxLength": 30},
        lambda: {"type": "integer", "exclusiveMinimum": 0, "multipleOf": source.choice((5, 10))},
    ]
    return source.choice(leaves)()
