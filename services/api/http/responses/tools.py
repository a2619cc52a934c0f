"""A body's ``tools`` and ``tool_choice`` as those of a chat: functions as they are, a tool of a text as a function of one,
namespaces as the functions in them. Tools that OpenAI's servers run themselves are left out beside those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.api.http.declared import read_declared
from services.api.http.openai.errors import Refused
from services.api.http.openai.fields import WITHOUT_EFFECT
from services.api.http.responses.conversation import read_item, type_as_said
from services.api.http.responses.own_names import OwnNames
from services.api.http.responses.tool_names import TEXT, ToolName, shown_name
from services.api.http.responses.tool_protocol import ChosenFunction, ChosenTools, FunctionTool, Namespace, TextTool

# They ask for what is not there; a client that offers tools of its own beside them goes on with those.
_BUILT_IN = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search", "image_generation",
    "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search", "web_search_2025_08_26",
    "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip
_TEXTS = "text, or unset: no grammar holds a tool's text"
_TYPES = "function, custom or namespace: there are no built-in tools"
# Fields of a tool that ask for nothing here, or that the model is not shown.
_UNSHOWN = ("type", "defer_loading", "allowed_callers", *WITHOUT_EFFECT)
_PARAMETERS = {
    "type": "object",
    "properties": {TEXT: {"type": "string"}},
    "required": [TEXT],
    "additionalProperties": False,
}


@dataclass(kw_only=True, slots=True)
class ChatTools:
    """The tools of a chat that says the same.

    Attributes:
        shown: as the chat's body has them.
        called: what the body calls each function.
        left_out: tools that are not there, each as it is refused.
    """

    shown: list[Any] = field(default_factory=list)
    called: dict[str, ToolName] = field(default_factory=dict)
    left_out: list[Refused] = field(default_factory=list)


def read_tools(given: Any, names: OwnNames) -> ChatTools:
    """The tools of a body.

    Args:
        names: is told what the chat's tools are called in the body.

    Raises:
        Refused: one is none, or there are built-in tools alone; names it.
    """
    tools = ChatTools()
    if not isinstance(given, list):
        raise Refused("tools", given, "a list", "invalid_type")
    for index, entry in enumerate(given):
        _read(entry, f"tools[{index}]", tools, names)
    if tools.left_out and not tools.shown:
        raise tools.left_out[0]
    return tools


def _read(entry: Any, path: str, tools: ChatTools, names: OwnNames, namespace: Namespace | None = None) -> None:
    if not isinstance(entry, dict):
        raise Refused(path, entry, "an object", "invalid_type")
    kind = entry.get("type")
    if kind == "namespace" and namespace is None:
        found = read_item(Namespace, entry, path)
        for index, each in enumerate(found.tools):
            _read(each, f"{path}.tools[{index}]", tools, names, found)
    elif kind == "function":
        read_item(FunctionTool, entry, path)
        function = {name: value for name, value in entry.items() if value is not None and name not in _UNSHOWN}
        _show(function, path, tools, names, namespace)
    elif kind == "custom":
        if isinstance(form := entry.get("format"), dict) and form.get("type") == "grammar":
            _leave_out(Refused(f"{path}.format.type", "grammar", _TEXTS, "unsupported_value"), tools, names)
            return
        text = read_item(TextTool, entry, path)
        described = {} if text.description is None else {"description": text.description}
        _show({"name": text.name, **described, "parameters": _PARAMETERS}, path, tools, names, namespace, free=True)
    else:
        refused = Refused(f"{path}.type", type_as_said(kind), _TYPES, "unsupported_value")
        if not isinstance(kind, str) or kind not in _BUILT_IN:
            raise refused
        _leave_out(refused, tools, names)


def _leave_out(refused: Refused, tools: ChatTools, names: OwnNames) -> None:
    tools.left_out.append(refused)
    # A tool of the chat may have the same number.
    names.learn(refused.field, refused.field, whole=True)


def _show(
    function: dict[str, Any],
    path: str,
    tools: ChatTools,
    names: OwnNames,
    namespace: Namespace | None,
    *,
    free: bool = False,
) -> None:
    name = function["name"]
    if namespace is not None:
        own = function.get("description")
        told = "\n".join(text for text in (namespace.description, own) if text)
        function = {**function, "name": shown_name(name, namespace.name), **({"description": told} if told else {})}
    names.learn(f"tools[{len(tools.shown)}]", path)
    tools.shown.append({"type": "function", "function": function})
    tools.called[function["name"]] = ToolName(name=name, namespace=namespace.name if namespace else "", free=free)


def chosen(given: Any) -> Any:
    """``tool_choice`` as a chat has it."""
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if kind == "allowed_tools":
        allowed = read_declared(ChosenTools, given, "tool_choice")
        tools = [{"type": "function", "function": {"name": each.name}} for each in allowed.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": tools}}
    if kind not in ("function", "custom"):
        allowed_types = "function, custom or allowed_tools"
        raise Refused("tool_choice.type", type_as_said(kind), allowed_types, "unsupported_value")
    return {"type": "function", "function": {"name": read_declared(ChosenFunction, given, "tool_choice").name}}
