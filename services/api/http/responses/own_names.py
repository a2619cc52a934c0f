"""Errors about the chat that a body was made into, in the names of the body's own fields."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.api.http.openai.errors import renamed
from speculation.errors import InvalidArgument

_KNOWN = {
    "messages": "input",
    "messages[].reasoning_content": "input[].content",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "logprobs": "top_logprobs",
}
_MESSAGE = re.compile(r"messages\[\d+\]")
_TOOL = re.compile(r"(tools\[\d+\])\.function")
_WORDS = re.compile(
    r"\b(?:messages\[\d+\](?:\.\w+|\[\d+\])*|max_completion_tokens|max_tokens|response_format|reasoning_effort)\b"
)
# Characters of a name that may be one of ours: others are a client's own.
_LONGEST = 256
_STEP = re.compile(r"[.\[][^.\[]*$")


class OwnNames:
    """What the body calls the fields of the chat that it was made into."""

    def __init__(self) -> None:
        self._known = dict(_KNOWN)
        self._whole: set[str] = set()

    def learn(self, field: str, own: str, *, whole: bool = False) -> None:
        """Take a name. ``whole``: it stands for all fields within that one, too."""
        self._known[field] = own
        if whole:
            self._whole.add(field)

    def moved(self, places: Sequence[int]) -> OwnNames:
        """The names where the chat's messages are those that were at ``places``."""
        names = OwnNames()
        numbers = {f"messages[{old}]": f"messages[{new}]" for new, old in enumerate(places)}
        for field, own in self._known.items():
            if (found := _MESSAGE.match(field)) is None or found[0] in numbers:
                renamed = field if found is None else numbers[found[0]] + field[found.end() :]
                names.learn(renamed, own, whole=field in self._whole)
        return names

    def of(self, field: str) -> str:
        """The own name of a field, or of the nearest one around it with what is left."""
        if len(field) > _LONGEST:
            return field
        known, rest = _TOOL.sub(r"\1", field), ""
        while known not in self._known:
            shorter = _STEP.sub("", known)
            if shorter == known:
                return known + rest
            known, rest = shorter, known[len(shorter) :] + rest
        return self._known[known] + ("" if known in self._whole else rest)

    def told(self, error: InvalidArgument) -> InvalidArgument:
        """The same error in own names."""
        allowed = _WORDS.sub(lambda found: self.of(found[0]), error.allowed)
        return renamed(error, self.of(error.field), allowed=allowed)
