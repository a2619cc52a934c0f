"""A body's ``tools`` and ``tool_choice``: what the template shows, and the grammar that makes a call certain."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from services.api.http.openai.answer_form import schema_form
from services.api.http.openai.errors import Refused
from services.api.http.openai.fields import WITHOUT_EFFECT, Fields, fields_of
from services.api.http.openai.mark_rules import MarkRules
from services.api.http.openai.protocol.chat_body import MAX_TOOLS
from services.api.http.openai.protocol.messages import AllowedTools, Function, FunctionName, NamedTool, Tool, ToolsToCall
from services.api.http.openai.tool_grammar import calls_in_messages, calls_in_text, listed_calls
from services.api.model_card import ModelCard
from services.tool_formats.catalogue import FORMATS
from services.tool_formats.harmony import NAME as HARMONY
from services.tool_formats.marks import Marks
from speculation.types import StructuredOutputs

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """How an answer calls tools.

    Attributes:
        mode: auto: text may hold calls; required: the answer is a list of calls; named: the arguments of one.
        shown: what the template is given, as JSON.
        schemas: of each function's arguments, by its name.
        strict: the functions whose arguments must follow their schema also where the model is free to call them, and the
            field that says so.
        several: an answer may call more than one.
        called: the named function.
        allowed: those that may be called, where the others are only shown; empty: all.
    """

    mode: Mode
    shown: str
    schemas: dict[str, Any]
    strict: dict[str, str] = field(default_factory=dict)
    several: bool = True
    called: str = ""
    allowed: tuple[str, ...] = ()

    @property
    def callable(self) -> dict[str, Any]:
        """Schemas of the functions that may be called."""
        return {name: schema for name, schema in self.schemas.items() if not self.allowed or name in self.allowed}

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that an answer must have; None: any, or one that depends on how the model writes calls."""
        if self.mode == "auto":
            return None
        if self.mode == "named":
            return schema_form(self.schemas[self.called], "tools")
        return _grammar(listed_calls(self.callable, several=self.several))

    def form_within(self, card: ModelCard) -> StructuredOutputs | None:
        """The form of text in which the model is free to call tools; None: any, as far as the tools ask for no more.

        Args:
            card: of the model, which says how it writes calls.

        Raises:
            Refused: this cannot be asked of such calls; names the field.
        """
        if self.mode != "auto" or (self.several and not self.strict and not self.allowed):
            return None
        marks, free = MarkRules(card), self.callable
        if card.tool_format == HARMONY:
            return _grammar(calls_in_messages(free, self.strict, marks))
        shape = FORMATS[card.tool_format](Marks()).shape
        if shape is not None:
            return _grammar(calls_in_text(free, self.strict, shape, marks, several=self.several))
        allowed = f"unset: this model writes calls as {card.tool_format}, which is read, but which no grammar is written for"
        if self.strict:
            raise Refused(next(iter(self.strict.values())), True, allowed, "unsupported_value")
        if self.allowed:
            raise Refused("tool_choice", "allowed_tools", allowed, "unsupported_value")
        raise Refused("parallel_tool_calls", False, allowed, "unsupported_value")


def _grammar(text: str) -> StructuredOutputs:
    return StructuredOutputs(kind="grammar", text=text)


def read_tools(fields: Fields) -> ToolUse | None:
    """What tools the answer may call; None: none.

    Raises:
        Refused: a tool or the choice is not valid; names the field.
    """
    listed, several = fields.listed("tools"), fields.truth("parallel_tool_calls")
    if not listed:
        # Without tools there is nothing to choose.
        if (choice := fields.take("tool_choice")) not in (None, "none", "auto"):
            raise fields.refuse("tool_choice", _shown(choice), "unset, auto or none where there are no tools")
        return None
    if len(listed) > MAX_TOOLS:
        raise fields.refuse("tools", f"{len(listed)} tools", f"at most {MAX_TOOLS} tools")
    schemas: dict[str, Any] = {}
    strict: dict[str, str] = {}
    for index, entry in enumerate(listed):
        name, schema, is_strict = _tool(fields_of(entry, Tool, f"tools[{index}]"))
        if name in schemas:
            raise fields.refuse("tools", f"two of the name {name}", "functions of different names")
        schemas[name] = schema
        if is_strict:
            strict[name] = f"tools[{index}].function.strict"
    chosen = _chosen(fields, schemas)
    if chosen is None:
        return None
    mode, names = chosen
    called, allowed = (names[0], ()) if mode == "named" else ("", () if len(names) == len(schemas) else names)
    shown = json.dumps([without_effect(entry) for entry in listed], ensure_ascii=False)
    return ToolUse(
        mode=mode, shown=shown, schemas=schemas, strict=strict, several=several is not False, called=called, allowed=allowed
    )


def without_effect(entry: dict[str, Any]) -> dict[str, Any]:
    """A tool as the model is shown it."""
    return {name: value for name, value in entry.items() if name not in WITHOUT_EFFECT}


def _tool(fields: Fields) -> tuple[str, Any, bool]:
    """A function's name, the schema of its arguments, and whether calls must follow it."""
    if (kind := fields.text("type")) != "function":
        raise fields.refuse("type", kind or "unset", "function", "unsupported_value")
    function = fields.below("function", Function)
    if function is None:
        raise fields.refuse("function", "unset", "an object", "missing_required_parameter")
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.refuse("name", name or "unset", "1 to 64 letters, digits, dots, dashes and underscores")
    function.text("description")
    schema = function.mapping("parameters")
    strict = function.truth("strict")
    for key in WITHOUT_EFFECT:
        fields.take(key)
    function.end()
    fields.end()
    return name, schema if schema is not None else {"type": "object", "properties": {}}, strict is True


def _chosen(fields: Fields, schemas: dict[str, Any]) -> tuple[Mode, tuple[str, ...]] | None:
    """Whether tools are called, and the functions that are named for it; None: no tools."""
    choice = fields.take("tool_choice")
    if choice is None or choice == "auto":
        return "auto", ()
    if choice == "none":
        return None
    if choice == "required":
        return "required", ()
    if not isinstance(choice, dict):
        raise fields.refuse("tool_choice", choice, f"one of {', '.join(_CHOICES)}, or a function's name in an object")
    if choice.get("type") == "allowed_tools":
        return _allowed(fields_of(choice, AllowedTools, "tool_choice"), schemas)
    return "named", (_named(fields_of(choice, NamedTool, "tool_choice"), schemas),)


def _allowed(fields: Fields, schemas: dict[str, Any]) -> tuple[Mode, tuple[str, ...]]:
    fields.take("type")
    below = fields.below("allowed_tools", ToolsToCall)
    if below is None:
        raise fields.refuse("allowed_tools", "unset", "an object", "missing_required_parameter")
    fields.end()
    mode, listed = below.one_of("mode"), below.listed("tools")
    if mode is None or not listed:
        missing = "mode" if mode is None else "tools"
        raise below.refuse(missing, "unset", "auto or required" if mode is None else "a list of the request's tools")
    names = tuple(
        _named(fields_of(entry, NamedTool, below.name(f"tools[{index}]")), schemas) for index, entry in enumerate(listed)
    )
    below.end()
    return "required" if mode == "required" else "auto", tuple(dict.fromkeys(names))


def _named(below: Fields, schemas: dict[str, Any]) -> str:
    if (kind := below.text("type")) != "function":
        raise below.refuse("type", kind or "unset", "function", "unsupported_value")
    function = below.below("function", FunctionName)
    name = None if function is None else function.text("name")
    if function is None or name not in schemas:
        known = ", ".join(schemas)
        raise below.refuse("function.name", name or "unset", f"one of the tools: {known}")
    function.end()
    below.end()
    return name


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else "set"
