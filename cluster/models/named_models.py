"""Reads ``drafter.models``, whose entries are folders, or mappings with a folder, a name and for whom it drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.settings.config import Settings
from services.drafter.heads.files.kinds import Checkpoint
from services.router.drafters import TrainedDrafter, as_drafter
from services.router.rules.conditions import Condition, read_conditions
from services.router.rules.fields import Field
from speculation.held_models import NAME, OTHER_NAME, HeldModel, is_name
from speculation.sources import blended, kind_of

_WHERE = "drafter.models"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """A model of ``drafter.models``.

    Attributes:
        name: what users call it; empty: as its kind.
        tenants: those that may use it; none: all may.
        when: what must hold of requests that it drafts for although they do not name it.
        written: the same as in ``HeldModel.when``.
    """

    folder: Path
    name: str = ""
    tenants: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()
    written: str = ""


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
            field.under("name", model.name).refuse(OTHER_NAME)
        models.append(model)
    return tuple(models)


def router_drafters(settings: Settings, found: Mapping[str, Checkpoint]) -> tuple[TrainedDrafter, ...]:
    """The models ``found``, as the router knows them."""
    return tuple(map(as_drafter, held_models(settings, found)))


def held_models(settings: Settings, found: Mapping[str, Checkpoint]) -> tuple[HeldModel, ...]:
    """The models ``found``, as a drafter tells of them."""
    named, used = settings.drafter.models, blended(found, named=settings.drafter.models is not None)
    models = [NamedModel(folder=each.folder) for each in found.values()] if named is None else read_models(named)
    return tuple(
        HeldModel(
            kind=kind_of(source),
            name=model.name,
            layers=checkpoint.layers,
            tenants=model.tenants,
            when=model.written,
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
        written=json.dumps(parts["when"].value) if "when" in parts else "",
    )


def _name(field: Field) -> str:
    if not is_name(field.value):
        field.refuse(NAME)
    return str(field.value)
