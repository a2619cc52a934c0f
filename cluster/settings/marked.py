"""Builds sections of the settings from what is marked in the components' configuration classes (services/settings.py)."""

from __future__ import annotations

from typing import Annotated, Any, get_origin

from pydantic import BaseModel, Field, create_model

from services.settings import Setting, settings_of


def marked(config: type, base: type[BaseModel]) -> type[BaseModel]:
    """A section that has the settings of a configuration class, and those of ``base``."""
    # The type checker does not see fields made here: where they are read, a base class under TYPE_CHECKING names them.
    fields: Any = {mark.name: _field(mark, kind, default) for mark, kind, default in settings_of(config)}
    return create_model(f"_{config.__name__}", __base__=base, **fields)


def _field(mark: Setting, kind: Any, default: Any) -> tuple[Any, Any]:
    pattern = mark.pattern
    if get_origin(kind) is tuple and pattern is not None:
        kind, pattern = tuple[Annotated[str, Field(pattern=pattern)], ...], None
    about = Field(
        default,
        description=mark.about,
        repr=not mark.secret,
        ge=mark.ge,
        gt=mark.gt,
        le=mark.le,
        multiple_of=mark.multiple_of,
        pattern=pattern,
    )
    return kind, about
