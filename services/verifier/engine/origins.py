"""Draft origins: the drafters of a decoding loop, each behind a link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speculation.errors import InvalidArgument
from speculation.held_models import DrafterCard, HeldModel
from speculation.ports import DescribedDrafts, DraftLink
from speculation.sources import spec_of
from speculation.types import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A drafter behind a link, in this process or another one.

    Attributes:
        name: unique among a loop's origins; used in logs.
        trusted: whether the draft distribution q that it reports is believed. ``acceptance: walk`` needs no trust; under
            ``acceptance: rejection`` a wrong q changes the answer.
        sources: the sources that it serves; None: all but those of ``others``.
        others: sources that another origin serves.
        models: the models that it holds by the settings; None: as its drafter tells, where it tells anything.
    """

    name: str
    link: DraftLink
    trusted: bool
    sources: frozenset[str] | None = None
    others: frozenset[str] = frozenset()
    models: tuple[HeldModel, ...] | None = None

    @property
    def card(self) -> DrafterCard | None:
        """What it holds; None: what the settings say."""
        if self.models is not None:
            return DrafterCard(held=self.models)
        return self.link.card if isinstance(self.link, DescribedDrafts) else None

    def serves(self, sources: Iterable[str]) -> tuple[str, ...]:
        """Those of ``sources`` that this origin serves."""
        served = [name for name in sources if name not in self.others] if self.others else sources
        return tuple(served) if self.sources is None else tuple([name for name in served if name in self.sources])

    def wants_features(self, plan: Plan, sources: Iterable[str], *, prompt: bool = False) -> bool:
        """Whether any of ``sources`` here uses hidden states, or with ``prompt`` those of the prompt."""
        if not plan.observe_layers or (prompt and not plan.observe_prompt):
            return False
        specs = [spec_of(name) for name in self.serves(sources)]
        return any(spec is not None and spec.layers and (spec.prompt_features or not prompt) for spec in specs)


def check_trusted(plan: Plan, origins: Iterable[Origin]) -> None:
    """Check that the plan's drafters may be used with its acceptance rule.

    Raises:
        InvalidArgument: the rule is rejection and one of its origins is not trusted.
    """
    if plan.acceptance != "rejection":
        return
    for origin in origins:
        if plan.speculates and origin.serves(plan.sources) and not origin.trusted:
            raise InvalidArgument("speculation.acceptance", plan.acceptance, f"walk: {origin.name} is not trusted")
