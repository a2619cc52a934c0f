"""One request's use of a costly source: its steps, its drafts and its tokens. See ``costly_sources``."""

from __future__ import annotations

from dataclasses import dataclass, field

from speculation.estimators import Ratio

# In tokens: how many of a request's own weigh as much as the experience of all requests, and how many are remembered.
_PRIOR, _MEMORY = 32.0, 512.0


@dataclass(slots=True)
class Brought(Ratio):
    """Tokens of the steps in which a source drafted: those of its alone (``part``), and all others (``whole``)."""

    def learn(self, extra: float, others: float) -> None:
        """Add newer ones; the oldest fade."""
        self.fade(_MEMORY, others)
        self.add(extra, others)

    def share(self, prior: Brought | None = None) -> float:
        """Tokens of the source alone for each other one, shrunk towards the share of ``prior``; 0 if nothing is known."""
        return self.of(prior.share(), _PRIOR) if prior is not None and prior.whole else self.of()


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
