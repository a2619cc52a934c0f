"""Declares settings in the configuration classes that use them: name, type, default, bounds and meaning, each written once.

A class marks a field that users may set with a ``Setting``::

    depth: Annotated[int, Setting(name="suffix_depth", ge=1, about="longest stretch that is counted")] = 16

``settings_of`` lists these marks, from which the schema of files and flags is built. ``filled`` puts the values that were
read into the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

_Config = TypeVar("_Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A field that users may set.

    Attributes:
        name: its key in its section of the settings. Fields of several classes may share a setting.
        about: its meaning, where the name does not say it.
        ge, gt, le: bounds: at least, greater than, at most.
    """

    name: str
    about: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None


def settings_of(config: type) -> Iterator[tuple[Setting, Any, Any]]:
    """Every setting of a configuration class and of the classes nested in it: its mark, type and default."""
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from settings_of(cast(type, hint))
        elif (mark := _mark(hint)) is not None:
            yield mark, get_args(hint)[0], field.default


def filled(config: type[_Config], value_of: Callable[[str], Any]) -> _Config:
    """A configuration with the values of its settings; all other fields keep their defaults.

    Args:
        value_of: gives the value of a setting by its name.
    """
    hints = get_type_hints(config, include_extras=True)
    values: dict[str, Any] = {}
    for field in fields(cast(Any, config)):
        hint = hints[field.name]
        if is_dataclass(hint):
            values[field.name] = filled(cast(type, hint), value_of)
        elif (mark := _mark(hint)) is not None:
            values[field.name] = value_of(mark.name)
    return config(**values)


def _mark(hint: Any) -> Setting | None:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Setting)), None)
