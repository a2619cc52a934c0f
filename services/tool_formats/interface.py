"""What a reader of calls is, for whichever form a model writes them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: JSON, as the model wrote it.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Read:
    """What the beginning of a text is.

    Attributes:
        end: where that beginning ends.
        calls: those in it; none: it is content.
    """

    end: int
    calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """A form of calls in text.

    Attributes:
        name: of the form.
        opening: a call begins with it. Empty: only the whole answer can be calls.
        closing: ends a call, which is a JSON object with ``name`` and then ``arguments``; empty: it is written otherwise.
    """

    name: str
    opening: str
    closing: str

    def read(self, text: str, schemas: Mapping[str, Any], *, ended: bool) -> Read | None:
        """What a text begins with, from ``opening`` on; None: more text must come before that is known.

        Args:
            schemas: of the arguments of each tool, by its name. A call of another one is content.
            ended: no more text comes.
        """
