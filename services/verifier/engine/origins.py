"""Where drafts come from: any number of origins for one loop."""

from __future__ import annotations

from dataclasses import dataclass

from speculation.ports import DraftLink
from speculation.types import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """One place that drafts: a drafter behind a link, in another process or in this one.

    Attributes:
        name: for the log; two origins of a loop have two names.
        trusted: whether its word on what it drew its drafts from (q) is believed. Under the walk nobody needs to be trusted;
            under ``acceptance: rejection`` a wrong q changes the answer.
        sources: the sources that it serves; None: every one.
    """

    name: str
    link: DraftLink
    trusted: bool
    sources: frozenset[str] | None = None

    def serves(self, plan: Plan) -> tuple[str, ...]:
        """Those of a plan's sources that draft here; none where the plan does not speculate."""
        if not plan.speculates:
            return ()
        return tuple(name for name in plan.sources if self.sources is None or name in self.sources)
