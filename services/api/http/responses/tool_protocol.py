"""The tools that a client offers over the Responses API, as they are declared."""

from __future__ import annotations

from typing import Any, Literal

from services.api.http.declared import Declared
from services.api.http.responses.item_protocol import SentBack


class FunctionTool(SentBack):
    """A function that the answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class TextFormOfInput(Declared):
    """The form of a tool's text; no grammar holds it to one."""

    type: Literal["text"]


class TextTool(SentBack):
    """A tool that takes a text; the model is shown a function of one text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: TextFormOfInput | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class Namespace(SentBack):
    """Tools under one name, which begins the names that the model is shown; its description begins theirs."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


class ChosenFunction(Declared):
    """The function that the answer calls."""

    type: Literal["function", "custom"]
    name: str


class ChosenTools(Declared):
    """The functions that may be called; the model is shown all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]
