"""The models that draft here, as the router knows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedDrafter:
    """A model that drafts.

    Attributes:
        source: what plans call it.
        layers: the layers whose hidden states it reads.
        blended: whether the blend uses it.
    """

    source: str
    layers: tuple[int, ...] = ()
    blended: bool = True
