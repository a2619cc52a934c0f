"""Draft origins. One loop may have several."""

from __future__ import annotations

from dataclasses import dataclass

from speculation.ports import DraftLink
from speculation.types import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A drafter behind a link, in this process or another one.

    Attributes:
        name: unique among a loop's origins; used in logs.
        trusted: whether the draft distribution q that it reports is believed. ``acceptance: walk`` needs no trust; under
            ``acceptance: rejection`` a wrong q changes the answer.
        sources: the sources that it serves; None: all.
    """

    name: str
    link: DraftLink
    trusted: bool
    sources: frozenset[str] | None = None

    def serves(self, plan: Plan) -> tuple[str, ...]:
        """The plan's sources that this origin serves; none if the plan does not speculate."""
        if not plan.speculates:
            return ()
        return tuple(name for name in plan.sources if self.sources is None or name in self.sources)
