"""OpenAI's harmony, in which gpt-oss writes: thoughts, calls and the answer are messages on channels.

https://github.com/openai/harmony
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from services.tool_formats.marks import Marks

NAME = "harmony"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_TO = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.\-]+)")


@dataclass(frozen=True, slots=True)
class Message:
    """What a message's head says of it.

    Attributes:
        to: the function that is called; empty: none.
    """

    kind: Literal["text", "thought"]
    to: str = ""


def message(head: str, marks: Marks) -> Message:
    """What a head says: its text before ``<|message|>``."""
    to = _TO.search(head)
    channel = head.partition(marks(CHANNEL))[2].split(maxsplit=1)
    thought = bool(channel) and channel[0].startswith("analysis")
    return Message("thought" if thought else "text", "" if to is None else to[1])
