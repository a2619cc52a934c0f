"""Checks of fields that a message has from outside."""

from __future__ import annotations

from typing import Any, get_args

from speculation.errors import InvalidArgument


def check_size(name: str, size: int, most: int) -> None:
    """Check the size of the field ``name``.

    Raises:
        InvalidArgument: it is above ``most``.
    """
    if size > most:
        raise InvalidArgument(name, f"{size} long", f"at most {most}")


def one_of(name: str, value: str, kind: Any) -> Any:
    """The value of the field ``name``, which is of the kind, a ``Literal``.

    Raises:
        InvalidArgument: it is not.
    """
    if value not in get_args(kind):
        raise InvalidArgument(name, value or "empty", f"one of {', '.join(get_args(kind))}")
    return value
