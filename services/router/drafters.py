"""Models that draft, as the router knows them: what users call each, and for whom it drafts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.router.rules.conditions import Condition, read_conditions
from services.router.rules.facts import Facts
from services.router.rules.fields import Field
from speculation.errors import ConfigurationError
from speculation.held_models import OTHER_NAME, HeldModel
from speculation.sources import kind_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedDrafter:
    """A model that drafts.

    Attributes:
        name: what users call it.
        source: what plans call it.
        layers: the layers whose hidden states it reads.
        tenants: those that may use it; none: all may.
        when: what must hold of requests that it drafts for although they do not name it.
        blended: whether ``auto`` and ``blend`` use it for requests that name no drafter.
        only_named: it drafts only for requests that name it.
    """

    name: str
    source: str
    layers: tuple[int, ...] = ()
    tenants: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()
    blended: bool = True
    only_named: bool = False

    @property
    def kind(self) -> str:
        """What sort of model it is: the source's name without the model's."""
        return kind_of(self.source)


Drafters = tuple[TrainedDrafter, ...]


def as_drafter(model: HeldModel) -> TrainedDrafter:
    """A model that a drafter holds, as the router knows it.

    Raises:
        ConfigurationError: its conditions are wrong.
    """
    when: tuple[Condition, ...] = ()
    if model.when:
        try:
            read = json.loads(model.when)
        except (ValueError, RecursionError):
            read = model.when
        when = read_conditions(Field(f"the model {model.called}", "when", read))
    return TrainedDrafter(
        name=model.called,
        source=model.source,
        layers=model.layers,
        tenants=model.tenants,
        when=when,
        blended=model.blended,
    )


def registered(own: Iterable[TrainedDrafter], held: Iterable[HeldModel]) -> Drafters:
    """The models that drafters hold. Where the settings say for whom one drafts, and its drafter does, too, both count.

    Args:
        own: those of the settings; what no drafter holds is left out.
    """
    named, found = {each.name: each for each in own}, list[TrainedDrafter]()
    for model in held:
        try:
            told = as_drafter(model)
            found.append(told if (ours := named.get(told.name)) is None else _both(ours, told))
        except ConfigurationError as error:
            log.warning("the model %s of a drafter is not used: %s", model.called, error)
    return tuple(found)


def _both(ours: TrainedDrafter, told: TrainedDrafter) -> TrainedDrafter:
    """A model by the settings and by its drafter.

    Raises:
        ConfigurationError: they are two of one name, or no tenant may use it by both.
    """
    if ours.source != told.source:
        raise ConfigurationError(place="drafter.models", field="name", value=repr(told.name), allowed=OTHER_NAME)
    tenants = tuple(each for each in told.tenants if not ours.tenants or each in ours.tenants) or ours.tenants
    if told.tenants and not set(tenants) <= set(told.tenants):
        raise ConfigurationError(
            "name one that both have", place="drafter.models", field="tenants", value=", ".join(ours.tenants)
        )
    return replace(told, tenants=tenants, when=(*ours.when, *told.when))


def usable_by(drafters: Iterable[TrainedDrafter], tenant: str | None) -> Drafters:
    """Those that a tenant may use: nobody learns of the others."""
    return tuple(each for each in drafters if not each.tenants or tenant in each.tenants)


def suited_to(drafters: Iterable[TrainedDrafter], facts: Facts) -> Drafters:
    """Those that a request may use; those whose conditions it does not satisfy only if it names them."""
    return tuple(
        replace(each, only_named=not all(condition.holds(facts) for condition in each.when))
        for each in usable_by(drafters, facts.tenant)
    )
