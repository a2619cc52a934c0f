"""The items of a conversation that a client sends to the Responses API, as they are declared."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from services.api.http.declared import Declared


def _as_it_is(value: object) -> object:
    return value


class Later(PlainValidator):
    """Of a field that is read elsewhere, whose errors know more: only its type is declared here."""

    def __init__(self, kind: Any) -> None:
        super().__init__(_as_it_is, json_schema_input_type=kind)


class SentBack(Declared):
    """What clients send back as they got it, or add for themselves: it asks for nothing."""

    id: Any = None
    status: Any = None
    object: Any = None
    created: Any = None
    created_by: Any = None
    index: Any = None
    cache_control: Any = None
    provider_specific_fields: Any = None


class InputText(SentBack):
    """A part of a content."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Any = None


class SentOutputText(SentBack):
    """A part of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


Content = str | list[InputText | SentOutputText]


class InputMessage(SentBack):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, Later(Content)]
    # Whether the assistant spoke on the way or at the end, which no chat template reads.
    phase: Any = None


class SentCall(SentBack):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class SentTextCall(SentBack):
    """A call of a tool that takes a text, in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutput(SentBack):
    """What a function gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Any, Later(Content)]


class TextCallOutput(SentBack):
    """What a tool that takes a text gave back."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    name: Any = None
    output: Annotated[Any, Later(Content)]


class SentThought(Declared):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class SentReasoning(SentBack):
    """What the model thought before an earlier answer; ``summary`` counts where there is no ``content``."""

    type: Literal["reasoning"]
    summary: list[SentThought] | None = None
    content: list[SentThought] | None = None
    encrypted_content: str | None = None


class ItemReference(Declared):
    """An item of a stored answer, by its id."""

    type: Literal["item_reference"]
    id: str


InputItem = InputMessage | SentCall | SentTextCall | CallOutput | TextCallOutput | SentReasoning | ItemReference
