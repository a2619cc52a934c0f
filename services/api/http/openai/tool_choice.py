"""A body's ``tools`` and ``tool_choice``: what the template shows, and the grammar that makes a call certain."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from services.api.http.openai.answer_form import schema_form
from services.api.http.openai.fields import Fields, fields_of
from speculation.types import StructuredOutputs

_MOST = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """How an answer calls tools.

    Attributes:
        mode: auto: text may hold calls in envelopes; required: the answer is a list of calls; named: the arguments of one.
        names: the functions.
        called: the named function.
        several: an answer may call more than one.
        schemas: of each function's arguments.
        shown: what the template is given, as JSON.
    """

    mode: Mode
    names: tuple[str, ...]
    shown: str
    schemas: dict[str, Any]
    several: bool = True
    called: str = ""

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that an answer must have; None: any."""
        if self.mode == "auto":
            return None
        if self.mode == "named":
            return schema_form(self.schemas[self.called], "tools")
        call = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in self.schemas.items()
        ]
        listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": call}}
        return schema_form(listed if self.several else {**listed, "maxItems": 1}, "tools")


def read_tools(fields: Fields) -> ToolUse | None:
    """What tools the answer may call; None: none.

    Raises:
        Refused: a tool or the choice is not valid; names the field.
    """
    listed, several = fields.listed("tools"), fields.truth("parallel_tool_calls")
    if listed is None:
        # Without tools there is nothing to choose.
        if (choice := fields.take("tool_choice")) not in (None, "none"):
            raise fields.refuse("tool_choice", _shown(choice), "unset, or none, where there are no tools")
        return None
    if not 1 <= len(listed) <= _MOST:
        raise fields.refuse("tools", f"{len(listed)} tools", f"1 to {_MOST} tools, or unset")
    schemas: dict[str, Any] = {}
    strict = None
    for index, entry in enumerate(listed):
        name, schema, is_strict = _tool(fields_of(entry, f"tools[{index}]"))
        if name in schemas:
            raise fields.refuse("tools", f"two of the name {name}", "functions of different names")
        schemas[name] = schema
        strict = f"tools[{index}].function.strict" if is_strict else strict
    mode, called = _mode(fields, schemas)
    if mode is None:
        return None
    if mode == "auto" and strict is not None:
        allowed = "false where tool_choice is auto: a call's arguments are held to its schema where it is required or named"
        raise fields.refuse(strict, True, allowed, "unsupported_value")
    shown = json.dumps(listed, ensure_ascii=False)
    return ToolUse(
        mode=mode, names=tuple(schemas), shown=shown, schemas=schemas, several=several is not False, called=called
    )


def _tool(fields: Fields) -> tuple[str, Any, bool]:
    """A function's name, the schema of its arguments, and whether calls must follow it."""
    if (kind := fields.text("type")) != "function":
        raise fields.refuse("type", kind or "unset", "function", "unsupported_value")
    function = fields.below("function")
    if function is None:
        raise fields.refuse("function", "unset", "an object", "missing_required_parameter")
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.refuse("name", name or "unset", "1 to 64 letters, digits, dots, dashes and underscores")
    function.text("description")
    schema = function.mapping("parameters")
    strict = function.truth("strict")
    function.end(known=("name", "description", "parameters", "strict"))
    fields.end(known=("type", "function"))
    return name, schema if schema is not None else {"type": "object", "properties": {}}, strict is True


def _mode(fields: Fields, schemas: dict[str, Any]) -> tuple[Mode | None, str]:
    choice = fields.take("tool_choice")
    if choice is None or choice == "auto":
        return "auto", ""
    if choice == "none":
        return None, ""
    if choice == "required":
        return "required", ""
    if not isinstance(choice, dict):
        raise fields.refuse("tool_choice", choice, f"one of {', '.join(_CHOICES)}, or a function's name in an object")
    below = fields_of(choice, "tool_choice")
    if (kind := below.text("type")) != "function":
        raise below.refuse("type", kind or "unset", "function", "unsupported_value")
    function = below.below("function")
    name = None if function is None else function.text("name")
    if function is None or name not in schemas:
        known = ", ".join(schemas)
        raise below.refuse("function.name", name or "unset", f"one of the tools: {known}")
    function.end(known=("name",))
    below.end(known=("type", "function"))
    return "named", name


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else "set"
