"""The fields of ``quantization_config``, each checked when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from speculation.errors import ConfigurationError, spelled


class QuantisationFields:
    """An object of ``config.json``.

    Args:
        name: where it stands, such as ``quantization_config``.
    """

    def __init__(self, given: object, name: str) -> None:
        if not isinstance(given, Mapping):
            raise ConfigurationError(field=name, value=_short(given), allowed="an object")
        self._given: Mapping[str, Any] = given
        self._name = name

    def refusal(self, key: str, allowed: str, why: str = "") -> ConfigurationError:
        """The error for a field with a value that is not served."""
        return ConfigurationError(why, field=f"{self._name}.{key}", value=_short(self._given.get(key)), allowed=allowed)

    def get(self, key: str) -> Any:
        """The field as it is; None: there is none."""
        return self._given.get(key)

    def named(self, name: str, older: str) -> str:
        """The name that a field goes by here: ``older`` where it has that one alone."""
        return older if name not in self._given and older in self._given else name

    def one_of(self, key: str, allowed: tuple[Any, ...], missing: Any = None) -> Any:
        """One of the values. None: ``missing``, which must be one of them, too.

        Raises:
            ConfigurationError: it is another.
        """
        value = self._given.get(key)
        value = missing if value is None else value
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise self.refusal(key, " or ".join(map(spelled, allowed)))
        return value

    def count(self, key: str, missing: int | None = None) -> int:
        """A whole number from 1 on.

        Raises:
            ConfigurationError: it is something else, or missing and ``missing`` is None.
        """
        value = self._given.get(key)
        value = missing if value is None else value
        if type(value) is not int or value < 1:
            raise self.refusal(key, "a whole number from 1 on")
        return value

    def empty(self, key: str, why: str) -> None:
        """Check that a field asks for nothing.

        Raises:
            ConfigurationError: it does; ``why`` that is not served.
        """
        if self._given.get(key):
            raise self.refusal(key, "null", why)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; empty where there is none.

        Raises:
            ConfigurationError: it is something else.
        """
        value = self._given.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise self.refusal(key, "a list of names")
        return tuple(value)

    def part(self, key: str) -> QuantisationFields:
        """A field that is an object itself.

        Raises:
            ConfigurationError: it is none.
        """
        return QuantisationFields(self._given.get(key), f"{self._name}.{key}")

    def parts(self) -> Iterator[QuantisationFields]:
        """All fields, each of them an object.

        Raises:
            ConfigurationError: one is none.
        """
        return (self.part(key) for key in self._given)


def _short(value: object) -> str:
    text = spelled(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
