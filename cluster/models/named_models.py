"""Reads ``drafter.models``: folders, or mappings that name a folder's model and say for whom it drafts; tells the router."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.settings.config import Settings
from services.drafter.heads.files.kinds import Checkpoint
from services.router.drafters import TrainedDrafter
from services.router.rules.conditions import Condition, read_conditions
from services.router.rules.fields import Field
from speculation.sources import SOURCES, blended

_WHERE = "drafter.models"
# With the kind of the model before it, it must fit into a source's name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """A model of ``drafter.models``.

    Attributes:
        name: what users call it; empty: as its kind.
        tenants: those that may use it; none: all may.
        when: what must hold of requests that it drafts for although they do not name it.
    """

    folder: Path
    name: str = ""
    tenants: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()


def read_models(entries: Sequence[Path | Mapping[str, Any]]) -> tuple[NamedModel, ...]:
    """The models that the setting names.

    Raises:
        ConfigurationError: an entry has an unknown field or a wrong value, or two have one name; says which one.
    """
    models: list[NamedModel] = []
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, Path):
            models.append(NamedModel(folder=entry))
            continue
        field = Field(f"{_WHERE}, model {number}", "", entry)
        model = _read(field)
        if model.name and any(other.name == model.name for other in models):
            field.under("name", model.name).refuse("a name that no other model has")
        models.append(model)
    return tuple(models)


def router_drafters(settings: Settings, found: Mapping[str, Checkpoint]) -> tuple[TrainedDrafter, ...]:
    """The models ``found``, as the router knows them."""
    named, used = settings.drafter.models, blended(found, named=settings.drafter.models is not None)
    models = [NamedModel(folder=each.folder) for each in found.values()] if named is None else read_models(named)
    return tuple(
        TrainedDrafter(
            name=model.name or source,
            source=source,
            layers=checkpoint.layers,
            tenants=model.tenants,
            when=model.when,
            blended=source in used,
        )
        for model, (source, checkpoint) in zip(models, found.items(), strict=True)
    )


def _read(entry: Field) -> NamedModel:
    parts = entry.below(("folder", "name", "tenants", "when"))
    folder = parts.get("folder", entry.under("folder", None)).text()
    return NamedModel(
        folder=Path(folder),
        name=_name(parts["name"]) if "name" in parts else "",
        tenants=parts["tenants"].texts() if "tenants" in parts else (),
        when=read_conditions(parts["when"]) if "when" in parts else (),
    )


def _name(field: Field) -> str:
    name = field.value
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in SOURCES:
        field.refuse("1 to 40 of the characters A-Z a-z 0-9 . _ -, beginning with a letter or digit, and no source's name")
    return name
