"""The hint for an unknown setting: the known ones that may be meant, and those of its section."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

# Most settings that are suggested.
_MOST = 3


def unknown(settings: type[BaseModel], where: Sequence[int | str]) -> str:
    """The error for a name that the settings do not have.

    Args:
        where: the path to it, from the top.
    """
    *above, name = (str(part) for part in where)
    section = settings
    for part in above:
        section = section_in(section.model_fields[part].annotation) or section
    known = sorted(section.model_fields)
    prefix = "".join(f"{part}." for part in above)
    everywhere = list(_everywhere(settings))
    nearest = difflib.get_close_matches(name, sorted({*known, *map(_name, everywhere)}), n=1)
    if not nearest:
        return f"unknown setting {prefix}{name}; known here: {', '.join(known)}"
    meant = [prefix + nearest[0]] if nearest[0] in known else [path for path in everywhere if _name(path) == nearest[0]]
    return f"unknown setting {prefix}{name}: did you mean {_either(meant[:_MOST])}? Known here: {', '.join(known)}"


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one, or may hold one."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _everywhere(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The settings of all sections that are always there, by their paths."""
    for name, field in section.model_fields.items():
        if field.annotation is (below := section_in(field.annotation)) and below is not None:
            yield from _everywhere(below, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _either(paths: Sequence[str]) -> str:
    *first, last = paths
    return f"{', '.join(first)} or {last}" if first else last
