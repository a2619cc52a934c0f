"""Bodies declared as pydantic models."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field

from services.api.http.declared import Declared, Whole, read_declared
from services.api.http.openai.errors import Refused
from tests.running.refusals import refuses


class Part(Declared):
    type: Literal["text"]
    text: str = Field(max_length=5)


class Body(Declared):
    parts: list[Part]
    limit: Whole | None = Field(None, ge=1, le=9)


def test_what_is_declared_is_read() -> None:
    body = read_declared(Body, {"parts": [{"type": "text", "text": "a"}], "limit": 3.0})
    assert body == Body(parts=[Part(type="text", text="a")], limit=3)
    assert type(body.limit) is int


@pytest.mark.parametrize(
    ("body", "field", "value", "allowed"),
    [
        ({}, "parts", "unset", "set"),
        ({"parts": [], "limits": 1}, "limits", 1, "unset: there is no such field (did you mean limit?)"),
        ({"parts": [], "limit": 0}, "limit", 0, "greater than or equal to 1"),
        ({"parts": [], "limit": "3"}, "limit", "3", "a valid integer"),
        ({"parts": [], "limit": True}, "limit", True, "a valid integer"),
        ({"parts": [{"type": "image", "text": ""}]}, "parts[0].type", "image", "'text'"),
        ({"parts": [{"type": "text", "text": None}]}, "parts[0].text", "null", "a valid string"),
        ({"parts": [{"type": "text", "text": "", "id": {}}]}, "parts[0].id", "set", "unset: there is no such field"),
        ({"parts": [], "image": "x"}, "image", "x", "not here"),
        ({"parts": ["x"]}, "parts[0]", "x", "an object"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], field: str, value: object, allowed: str) -> None:
    with refuses(Refused, field, value, allowed=allowed):
        read_declared(Body, body, hints={"image": "not here"})
