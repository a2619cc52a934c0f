"""Models that draft, as the router knows them: what users call each, and for whom it drafts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.router.rules.conditions import Condition
from services.router.rules.facts import Facts
from speculation.sources import kind_of


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


def usable_by(drafters: Iterable[TrainedDrafter], tenant: str | None) -> Drafters:
    """Those that a tenant may use: nobody learns of the others."""
    return tuple(each for each in drafters if not each.tenants or tenant in each.tenants)


def suited_to(drafters: Iterable[TrainedDrafter], facts: Facts) -> Drafters:
    """Those that a request may use; those whose conditions it does not satisfy only if it names them."""
    return tuple(
        replace(each, only_named=not all(condition.holds(facts) for condition in each.when))
        for each in usable_by(drafters, facts.tenant)
    )
