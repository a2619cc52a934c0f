"""The messages and the tools of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import NO_EFFECT, Aside
from services.api.http.openai.protocol.parts import Content, Echoed, Schema

_SENT_BACK = "empty: a field of answers that asks for nothing, so that they can be sent back as they came"
Empty = Annotated[Literal[""] | Annotated[list[Any], Field(max_length=0)] | None, NO_EFFECT]


class CalledFunction(Declared):
    """A function and its arguments."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str | None = Field(None, description="JSON, as the model wrote it, also where it was cut short")


class Call(Echoed):
    """A call of a tool that the assistant has made."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Echoed):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="developer is read as system")
    content: Content | None = Field(None, description="null or a text; unset only where the assistant calls tools")
    name: str | None = Field(
        None, max_length=256, description="where the template does not show it, named in x-outrider-ignored"
    )
    tool_calls: list[Call] | None = Field(None, description="of the assistant")
    tool_call_id: str | None = Field(None, max_length=256, description="of a tool, which must have it: the call it answers")
    reasoning_content: str | None = Field(
        None, description="what the assistant thought; where the template does not read it, named in x-outrider-ignored"
    )
    reasoning: str | None = Field(None, description="as reasoning_content, of which one may be set")
    refusal: Empty = Field(None, description=_SENT_BACK)
    audio: Empty = Field(None, description=_SENT_BACK)
    function_call: Empty = Field(None, description=_SENT_BACK)
    annotations: Empty = Field(None, description=_SENT_BACK)
    id: Aside = None


class Function(Declared):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Schema | None = Field(None, description="a JSON schema of its arguments; unset: it has none")
    strict: bool | None = Field(
        None, description="true: its arguments follow the schema also where the model is free to call it"
    )


class Tool(Echoed):
    """A tool; functions alone are known."""

    type: Literal["function"]
    function: Function
    id: Aside = None


class FunctionName(Declared):
    """A function of the request's tools."""

    name: str


class NamedTool(Declared):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class ToolsToCall(Declared):
    """Some of the request's tools."""

    mode: Literal["auto", "required"] = Field(description="required: at least one of them is called")
    tools: list[NamedTool]


class AllowedTools(Declared):
    """The tools that may be called; the model is shown all."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolsToCall


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools
