"""The tools of a conversation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import Aside
from services.api.http.openai.protocol.parts import Schema


class Function(Declared):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Schema | None = Field(None, description="a JSON schema of its arguments; unset: it has none")
    strict: bool | None = Field(
        None, description="true: its arguments follow the schema also where the model is free to call it"
    )


class Tool(Declared):
    """A tool; functions alone are known."""

    type: Literal["function"]
    function: Function
    id: Aside = None
    object: Aside = None
    created: Aside = None
    index: Aside = None
    status: Aside = None
    cache_control: Aside = None
    provider_specific_fields: Aside = None


class FunctionName(Declared):
    """A function of the request's tools."""

    name: str


class NamedTool(Declared):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
