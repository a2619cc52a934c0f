"""One request's use of a costly source: how long it has drafted, and what it alone brought; see ``costly_sources``."""

from __future__ import annotations

from dataclasses import dataclass, field

# How many tokens' experience of all requests weighs as much as a request's own, and how many are remembered.
_PRIOR, _MEMORY = 32.0, 512.0


@dataclass(slots=True)
class Brought:
    """Tokens of steps in which a source drafted: those that it alone brought, and all others."""

    extra: float = 0.0
    others: float = 0.0

    def add(self, other: Brought, memory: float = _MEMORY) -> None:
        """Add newer ones; the oldest fade."""
        kept = min(1.0, memory / max(memory, self.others + other.others))
        self.extra, self.others = kept * self.extra + other.extra, kept * self.others + other.others

    def share(self, prior: Brought | None = None) -> float:
        """Extra tokens for each other one, shrunk to the ``prior``'s share. 0 if nothing is known."""
        weight = _PRIOR if prior is not None and prior.others else 0.0
        extra = self.extra + (weight * prior.share() if weight and prior is not None else 0.0)
        return extra / (self.others + weight) if self.others + weight else 0.0


@dataclass(kw_only=True, slots=True)
class Use:
    """One request's use of a costly source.

    Attributes:
        trial: it is not known whether it pays.
        steps: steps since it began; ``drafts``: drafts of the source that came.
    """

    trial: bool
    steps: int = 0
    drafts: int = 0
    brought: Brought = field(default_factory=Brought)
