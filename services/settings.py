"""Declares settings in the configuration classes that use them: name, type, default, bounds and meaning, each written once.

A class marks a field that users may set with a ``Setting``::

    depth: Annotated[int, Setting("longest suffix that is counted, in tokens", name="suffix_depth", ge=1)] = 16

``settings_of`` lists these marks, from which the schema of files and flags is built (cluster/settings/marked.py). ``filled``
puts the values that were read into the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that users may set. It has a default.

    Attributes:
        about: its meaning, in one sentence, and what it costs.
        name: its key in its section of the settings; empty: the field's own name. Fields of several classes may share a
            setting.
        ge, gt, le: bounds: at least, greater than, at most.
        multiple_of: what a number must be a multiple of.
        pattern: regular expression of a text, or of each text of a tuple.
        secret: whether no log may show it.
    """

    about: str
    _: KW_ONLY
    name: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    multiple_of: int | None = None
    pattern: str | None = None
    secret: bool = False


def settings_of(config: type) -> Iterator[tuple[Setting, Any, Any]]:
    """Every setting of a configuration class and of the classes nested in it: its mark, type and default."""
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from settings_of(cast(type, hint))
        elif (mark := _mark(field, hint)) is not None:
            factory = field.default_factory
            yield mark, get_args(hint)[0], field.default if factory is MISSING else factory()


def filled(config: type[_Config], section: object, **computed: Any) -> _Config:
    """A configuration with the values of its settings and the ``computed`` ones; all other fields keep their defaults.

    Args:
        section: has the settings as attributes.
        computed: fields that are no settings, and nested configurations that need such fields.
    """
    hints = get_type_hints(config, include_extras=True)
    values: dict[str, Any] = {}
    for field in fields(cast(Any, config)):
        hint = hints[field.name]
        if field.name in computed:
            continue
        if is_dataclass(hint):
            values[field.name] = filled(cast(type, hint), section)
        elif (mark := _mark(field, hint)) is not None:
            values[field.name] = getattr(section, mark.name)
    return config(**values, **computed)


def _mark(field: Field[Any], hint: Any) -> Setting | None:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    found = next((mark for mark in marks if isinstance(mark, Setting)), None)
    return found and replace(found, name=found.name or field.name)
