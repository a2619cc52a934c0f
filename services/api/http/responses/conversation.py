"""Items of a body's ``input`` as the messages of a chat.

What the assistant thought, said and called stands in items of its own, next to each other: they are one message of a chat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from services.api.http.declared import Declared, read_declared
from services.api.http.openai.errors import Refused
from services.api.http.openai.shared_fields import parts_of
from services.api.http.responses.item_protocol import (
    CallOutput,
    InputMessage,
    InputText,
    ItemReference,
    SentBack,
    SentCall,
    SentOutputText,
    SentReasoning,
    SentTextCall,
    TextCallOutput,
)
from services.api.http.responses.own_names import OwnNames
from services.api.http.responses.tool_names import arguments_with, shown_name

Item = dict[str, Any]
_KINDS: dict[str, type[SentBack]] = {
    "message": InputMessage,
    "function_call": SentCall,
    "function_call_output": CallOutput,
    "custom_tool_call": SentTextCall,
    "custom_tool_call_output": TextCallOutput,
    "reasoning": SentReasoning,
}
_PARTS: dict[str, type[SentBack]] = {"input_text": InputText, "output_text": SentOutputText}
# Of one assistant's message, in this order; calls may be several.
_THOUGHT, _SAID, _CALLED = range(3)
_Kind = TypeVar("_Kind", bound=Declared)


def read_reference(item: Item, path: str) -> str | None:
    """The id of the stored item that an item stands for; None: it stands for itself."""
    return read_item(ItemReference, item, path).id if item.get("type") == "item_reference" else None


def read_item(kind: type[_Kind], item: Item, path: str) -> _Kind:
    """An item as it is declared; null is unset."""
    return read_declared(kind, {name: value for name, value in item.items() if value is not None}, path)


class ItemsAsChat:
    """A chat that is made of items.

    Attributes:
        messages: the chat's, as its door reads them.
        names: what its fields are called in the items.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names = OwnNames()
        # How far the assistant's message has come; None: the last message is not the assistant's, or ended.
        self._stage: int | None = None

    def add(self, items: Iterable[tuple[Item, str]]) -> None:
        """Add items, each with its name in errors.

        Raises:
            Refused: one is none; names the item and its field.
        """
        for item, path in items:
            self._add(item, path)

    def instruct(self, text: str) -> None:
        """Begin with instructions."""
        self._begin({"role": "system", "content": text}, "instructions")

    def _add(self, item: Item, path: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        declared = _KINDS.get(kind) if isinstance(kind, str) else None
        if declared is None:
            raise Refused(
                f"{path}.type", type_as_said(kind), f"one of {', '.join(_KINDS)}, item_reference", "unsupported_value"
            )
        read = read_item(declared, item, path)
        if isinstance(read, InputMessage) and read.role == "assistant":
            self._assistant(_SAID, path)["content"] = content_of(read.content, f"{path}.content")
            self._learn("content", path, "content")
        elif isinstance(read, InputMessage):
            content = content_of(read.content, f"{path}.content")
            self._begin({"role": read.role, "content": content}, path)
            self._learn("content", path, "content")
        elif isinstance(read, SentReasoning):
            self._think(read, path)
        elif isinstance(read, SentCall | SentTextCall):
            self._call(read, path)
        elif isinstance(read, CallOutput | TextCallOutput):
            output = content_of(read.output, f"{path}.output")
            message = {"role": "tool", "tool_call_id": read.call_id, "content": output}
            self._begin(message, path)
            self._learn("content", path, "output")
            self._learn("tool_call_id", path, "call_id")

    def _begin(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self._stage = None
        self.names.learn(f"messages[{len(self.messages) - 1}]", path, whole=True)

    def _assistant(self, stage: int, path: str) -> dict[str, Any]:
        """The assistant's message that has room for what comes at this stage."""
        if self._stage is None or stage < self._stage or (stage == self._stage and stage != _CALLED):
            self._begin({"role": "assistant", "content": None}, path)
        self._stage = stage
        return self.messages[-1]

    def _learn(self, field: str, path: str, own: str = "") -> None:
        """Name a field of the last message after one of an item; only items of the body's list have such names."""
        if path.endswith("]"):
            self.names.learn(f"messages[{len(self.messages) - 1}].{field}", f"{path}.{own}" if own else path)

    def _think(self, item: SentReasoning, path: str) -> None:
        parts = item.content or item.summary or []
        if not parts:
            if item.encrypted_content:
                allowed = "unset where content and summary have no text: encrypted thoughts are not read here"
                raise Refused(f"{path}.encrypted_content", "set", allowed, "unsupported_value")
            return
        self._assistant(_THOUGHT, path)["reasoning_content"] = "".join(part.text for part in parts)
        self._learn("reasoning_content", path, "content" if item.content else "summary")

    def _call(self, item: SentCall | SentTextCall, path: str) -> None:
        message = self._assistant(_CALLED, path)
        calls = message.setdefault("tool_calls", [])
        self._learn(f"tool_calls[{len(calls)}].function", path)
        self._learn(f"tool_calls[{len(calls)}].id", path, "call_id")
        arguments = item.arguments if isinstance(item, SentCall) else arguments_with(item.input)
        function = {"name": shown_name(item.name, item.namespace), "arguments": arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})


def type_as_said(kind: Any) -> str:
    """An item's or part's type, as an error tells it."""
    return kind if isinstance(kind, str) and kind else "unset" if kind is None else "set"


def content_of(content: Any, path: str) -> str | list[dict[str, str]]:
    """A content as the chat door has it.

    Raises:
        Refused: it is neither a text nor a list of parts that are texts; names the part.
    """
    if isinstance(content, str):
        return content
    texts = []
    for name, part in parts_of(content, path, "input_text"):
        kind = part.get("type")
        declared = _PARTS.get(kind) if isinstance(kind, str) else None
        if declared is None:
            allowed = "input_text, or output_text of the assistant: the model reads text alone"
            raise Refused(f"{name}.type", type_as_said(kind), allowed, "unsupported_value")
        read_item(declared, part, name)
        texts.append({"type": "text", "text": part["text"]})
    return texts
