"""What tools are called: by the body, and by the model."""

from __future__ import annotations

import json
from dataclasses import dataclass

# The one argument of a tool that takes a text.
TEXT = "input"
_BETWEEN = "__"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolName:
    """A tool that the model calls as a function.

    Attributes:
        namespace: empty: none.
        free: it takes a text, not arguments.
    """

    name: str
    namespace: str = ""
    free: bool = False


def shown_name(name: str, namespace: str | None) -> str:
    """What the model calls a function."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


def arguments_with(text: str) -> str:
    """The arguments of a call with a text."""
    return json.dumps({TEXT: text}, ensure_ascii=False)


def text_in(arguments: str) -> str:
    """The text of a call; of arguments that hold none, such as those that were cut short, all that the model wrote."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(TEXT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
