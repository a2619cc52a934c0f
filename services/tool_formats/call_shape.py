"""How a form writes calls, piece by piece: grammars are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
