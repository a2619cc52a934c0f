"""Checks the values of a rule's fields; each refusal names the rule, the field, its value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from speculation.errors import ConfigurationError, quoted

# Of a text that is compared, and how many a condition may name.
_MOST_CHARACTERS, _MOST_TEXTS = 512, 64
# Characters of a refused value that are shown.
_SHOWN = 80
# Half of a surrogate pair: JSON and YAML can write it, UTF-8 cannot.
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a rule.

    Attributes:
        where: the rule, such as "rules.yaml, rule 2".
        name: the field's path in it, such as "when.prompt_tokens.min".
    """

    where: str
    name: str
    value: Any

    def refuse(self, allowed: str) -> NoReturn:
        """Refuse the value.

        Raises:
            ConfigurationError: always.
        """
        shown = quoted(self.value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        raise ConfigurationError(place=self.where, field=self.name or "it", value=shown, allowed=allowed)

    def below(self, known: tuple[str, ...]) -> dict[str, Field]:
        """The fields of a mapping, by name.

        Raises:
            ConfigurationError: it is none, or has others than the ``known`` ones.
        """
        fields = self.entries(f"a mapping with some of {', '.join(known)}")
        for name, field in fields.items():
            if name not in known:
                field.refuse(f"left out: known {f'in {self.name}' if self.name else 'here'} are {', '.join(known)}")
        return fields

    def entries(self, allowed: str = "a mapping of names to texts") -> dict[str, Field]:
        """The fields of a mapping whose names are anybody's."""
        if not isinstance(self.value, Mapping):
            self.refuse(allowed)
        named = {f"{name}": value for name, value in self.value.items()}
        self._check_characters(named)
        return {name: self.under(name, value) for name, value in named.items()}

    def under(self, name: str, value: object) -> Field:
        """A field below this one."""
        return Field(self.where, f"{self.name}.{name}" if self.name else name, value)

    def truth(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def whole(self, low: int, high: int) -> int:
        """A whole number within bounds."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not low <= self.value <= high:
            self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def one_of(self, names: tuple[str, ...]) -> str:
        """One of some names."""
        if not isinstance(self.value, str) or self.value not in names:
            self.refuse(f"one of {', '.join(names)}")
        return self.value

    def text(self, most: int = _MOST_CHARACTERS) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str) or not 1 <= len(self.value) <= most:
            self.refuse(f"a text of 1 to {most} characters")
        self._check_characters([self.value])
        return self.value

    def texts(self) -> tuple[str, ...]:
        """A text, or a list of some."""
        listed = self.value if isinstance(self.value, list) else [self.value]
        fit = 1 <= len(listed) <= _MOST_TEXTS and all(
            isinstance(text, str) and len(text) <= _MOST_CHARACTERS for text in listed
        )
        if not fit:
            self.refuse(
                f"a text of at most {_MOST_CHARACTERS} characters, or a list of 1 to {_MOST_TEXTS} (quote numbers and yes)"
            )
        self._check_characters(listed)
        return tuple(listed)

    def _check_characters(self, texts: Iterable[str]) -> None:
        if any(_HALF.search(text) for text in texts):
            self.refuse("whole characters: half of a surrogate pair is none")
