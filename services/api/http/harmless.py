"""Fields that are not honoured: values that ask for nothing are taken, all others refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.api.http.openai.errors import Refused, shown

# Which values ask for nothing, and what is said of all others.
Rule = tuple[Callable[[Any], bool], str]


def never(value: Any) -> bool:
    """No value asks for nothing, but null."""
    return False


def among(*values: Any) -> Callable[[Any], bool]:
    """Whether it is one of these values, of the same type: 1 is not true."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def honoured(
    entry: Mapping[str, Any], rules: Mapping[str, Rule], path: str = "", codes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """An object without the fields that ask for nothing.

    Args:
        path: its name in errors; empty: the whole body.
        codes: of errors about some of the fields.

    Raises:
        Refused: a field that is not honoured asks for something.
    """
    for key, (harmless, allowed) in rules.items():
        value = entry.get(key)
        if value is not None and not harmless(value):
            code = (codes or {}).get(key, "unsupported_parameter")
            raise Refused(f"{path}.{key}" if path else key, shown(value), allowed, code)
    return {key: value for key, value in entry.items() if key not in rules}
