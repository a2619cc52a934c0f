"""What requests may name, as it is listed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NameableDrafter:
    """A model that drafts, as requests may name it; ``strategy``: the one that drafts with it alone."""

    name: str
    strategy: str
