"""What a reader of calls is, for whichever form a model writes them in, and how a form writes them, for grammars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from services.tool_formats.raw_json import is_json
from services.tool_formats.tape import OtherwiseError, Reading, Tape


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: JSON, as the model wrote it.
        id: the model's own; empty: it gives none.
    """

    name: str
    arguments: str
    id: str = ""


class Calls:
    """The calls that a reader finds.

    Args:
        schemas: of the arguments of each tool, by its name. What calls another one is content.

    Attributes:
        found: calls that are complete and not yet told.
        begun: the call that is being read; None: its name is not known yet.
        members: its arguments so far, as JSON by their names, where they are not JSON in the text.
    """

    def __init__(self, tape: Tape, schemas: Mapping[str, Any]) -> None:
        self._tape = tape
        # What has been read of the call that was begun, before its arguments.
        self._head = ""
        self.schemas = schemas
        self.found: list[ToolCall] = []
        self.begun: ToolCall | None = None
        self.members: Mapping[str, str] = {}

    def begin(self, name: str, id: str = "") -> None:
        """A call's name has been read; its arguments come next.

        Raises:
            OtherwiseError: there is no such tool.
        """
        if name not in self.schemas:
            raise OtherwiseError
        self.begun, self.members = ToolCall(name, "", id), {}
        self._head += self._tape.forget()

    def end(self, arguments: str) -> None:
        """The arguments of the call that was begun have been read.

        Raises:
            OtherwiseError: they are no JSON.
        """
        if self.begun is None or not is_json(arguments):
            raise OtherwiseError
        self.found.append(ToolCall(self.begun.name, arguments, self.begun.id))
        self.begun, self._head = None, ""
        self._tape.forget()

    def schema_of(self, argument: str) -> Any:
        """The schema of an argument of the call that was begun; None: there is none."""
        return argument_schema(self.schemas[self.begun.name], argument) if self.begun is not None else None

    def unread(self) -> str:
        """What has been read and is no call."""
        head, self._head = self._head, ""
        self.begun = None
        return head + self._tape.forget()


def argument_schema(schema: Any, argument: str) -> Any:
    """The schema of an argument, or what it refers to in the tool's definitions; None: there is none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.get(argument) if isinstance(properties, dict) else None
    named = found.get("$ref") if isinstance(found, dict) else None
    for part in named.removeprefix("#/").split("/") if isinstance(named, str) and named.startswith("#/") else ():
        schema = schema.get(part) if isinstance(schema, dict) else None
    return schema if isinstance(named, str) and named.startswith("#/") else found


class ToolFormat(Protocol):
    """A form of calls in text. Its marks may be special tokens (``services.tool_formats.marks``).

    Attributes:
        name: of the form.
        openings: calls begin with one of them.
        first: that is so at the beginning of an answer alone.
        marks: all texts in it that may be special tokens.
        shape: how a call is written, for grammars; None: no grammar can be made of it.
    """

    name: str
    openings: tuple[str, ...]
    first: bool
    marks: tuple[str, ...]

    @property
    def shape(self) -> CallShape | None: ...

    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        """Read calls, behind their opening.

        Raises:
            EndedError: the text ends within them.
            OtherwiseError: they are none, but content; those that were found stay calls.
        """

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        """The call that a text ended within, with as much of its arguments as there is; None: its name is not there.

        Args:
            text: what was read since the call was begun; without one, since the opening or the end of the call before.
        """

    def call_id(self, name: str, index: int) -> str:
        """An id for an answer's call number ``index``, as the model's template takes it."""


class Slot(Enum):
    """What stands between the marks and words of a call."""

    SPACE = "white space, perhaps none"
    NAME = "the function's name"
    QUOTED_NAME = "the name as JSON"
    NUMBER = "a whole number"
    ARGUMENTS = "the arguments as JSON"
    TAGGED = "the arguments one by one, between tags"


Step = str | Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """What stands around an argument's name and value, where they stand one by one."""

    before_key: str
    between: tuple[str, ...]
    after_value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """Calls in text. A step is a mark, other text, or a slot.

    Attributes:
        opening: begins calls.
        before: what stands between it and the first call.
        call: one call.
        between: what stands between two of them; None: behind one opening stands one call.
        after: what ends them.
        first: they stand at the beginning of an answer alone, with ``opening`` or without.
        tags: around arguments.
    """

    opening: str
    before: tuple[Step, ...] = ()
    call: tuple[Step, ...]
    between: tuple[Step, ...] | None = None
    after: tuple[Step, ...] = ()
    first: bool = False
    tags: Tags | None = None


def json_object(arguments: str) -> tuple[Step, ...]:
    """A call that is a JSON object; ``arguments`` is the name of the arguments."""
    space = Slot.SPACE
    named: tuple[Step, ...] = ("{", space, '"name"', space, ":", space, Slot.QUOTED_NAME, space, ",", space)
    return (*named, f'"{arguments}"', space, ":", space, Slot.ARGUMENTS, space, "}")
