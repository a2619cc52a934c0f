"""Takes the fields of a JSON object one by one, within the bounds that are declared. Those left over are refused."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic import BaseModel

from services.api.http.openai.errors import Refused
from services.api.http.openai.protocol import marks
from services.wrong_values import did_you_mean

_Kind = TypeVar("_Kind")
# Fields of messages, of their parts and of tools that clients add for themselves or for other servers.
WITHOUT_EFFECT = ("id", "object", "created", "index", "status", "cache_control", "provider_specific_fields")


class Fields:
    """The fields of one object. null means unset, as in OpenAI's API.

    Args:
        content: the object.
        declared: where the bounds of its fields are.
        path: the object's own name in errors, such as "messages[0]"; empty: the whole body.
    """

    def __init__(self, content: dict[str, Any], declared: type[BaseModel], path: str = "") -> None:
        self._left = dict(content)
        self._declared = declared
        self._path = path

    def name(self, key: str) -> str:
        """A field's name in errors."""
        return f"{self._path}.{key}" if self._path else key

    def given(self, key: str) -> bool:
        """Whether a field is there and has not been taken; it may be null."""
        return key in self._left

    def take(self, key: str) -> Any:
        """A field's value, whatever it is; None if it is unset."""
        return self._left.pop(key, None)

    def refuse(self, key: str, value: object, allowed: str, code: str = "invalid_value") -> Refused:
        """An error that names a field."""
        return Refused(self.name(key), value, allowed, code)

    def _typed(self, key: str, kind: type[_Kind], what: str) -> _Kind | None:
        value = self.take(key)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(key, value, what, "invalid_type")
        return value

    def truth(self, key: str) -> bool | None:
        """A field that is true or false."""
        return self._typed(key, bool, "true or false")

    def whole(self, key: str) -> int | None:
        """A field that is a whole number."""
        low, high = marks.range_of(self._declared, key)
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(key, value, "a whole number", "invalid_type")
        if not low <= value <= high:
            raise self.refuse(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str) -> float | None:
        """A field that is a number."""
        low, high = marks.range_of(self._declared, key)
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(key, value, "a number", "invalid_type")
        # Compared first: a whole number may be too large for a float.
        if not low <= value <= high or not math.isfinite(value):
            raise self.refuse(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, key: str) -> str | None:
        """A field that is a text."""
        most = marks.most_of(self._declared, key)
        value = self._typed(key, str, "a text")
        if value is not None and most is not None and len(value) > most:
            raise self.refuse(key, f"{len(value)} characters", f"at most {most} characters")
        return value

    def one_of(self, key: str) -> str | None:
        """A field that is one of some words."""
        allowed = marks.words_of(self._declared, key)
        value = self._typed(key, str, "a text")
        if value is not None and value not in allowed:
            raise self.refuse(key, value or "empty", f"one of {', '.join(allowed)}")
        return value

    def listed(self, key: str) -> list[Any] | None:
        """A field that is a list."""
        return self._typed(key, list, "a list")

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A field that is a list of token ids."""
        value = self.listed(key)
        return None if value is None else token_ids(self.name(key), value)

    def mapping(self, key: str) -> dict[str, Any] | None:
        """A field that is an object, as it is."""
        return self._typed(key, dict, "an object")

    def below(self, key: str, declared: type[BaseModel]) -> Fields | None:
        """The fields of an object within this one."""
        value = self.mapping(key)
        return None if value is None else Fields(value, declared, self.name(key))

    def end(self) -> None:
        """Refuse what has not been taken.

        Raises:
            Refused: a field is left.
        """
        known = marks.names_of(self._declared, "honoured") if self._left else []
        for key, value in self._left.items():
            shown = value if isinstance(value, str | int | float) and value != "" else "set" if value != "" else "empty"
            raise self.refuse(key, shown, f"unset: there is no such field{did_you_mean(key, known)}", "unknown_parameter")


def token_ids(name: str, values: list[Any]) -> tuple[int, ...]:
    """A list's values as token ids.

    Raises:
        Refused: one is none.
    """
    for index, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise Refused(f"{name}[{index}]", value, "a token id, a whole number from 0", "invalid_type")
    return tuple(values)


def fields_of(value: Any, declared: type[BaseModel], path: str) -> Fields:
    """The fields of an object in a list.

    Raises:
        Refused: it is no object.
    """
    if not isinstance(value, dict):
        raise Refused(path, value, "an object", "invalid_type")
    return Fields(value, declared, path)
