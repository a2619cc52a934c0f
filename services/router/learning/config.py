"""Settings of what a router learns, and their check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.settings import Setting

# Strategies that may take the place of ``auto`` where nobody says. Those with the same sources would be no other choice.
USUAL = ("autoregressive", "prompt_lookup", "suffix", "recycling")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningConfig:
    """What a router learns.

    Attributes:
        alone: there is no other router of this service.
    """

    on: Annotated[
        bool,
        Setting(
            "whether the router learns which strategy is fastest for which requests, where neither the request nor a rule "
            "says one; it replays answers under the others, for no more than 1 % of the time that answers take",
            name="learning",
        ),
    ] = False
    strategies: Annotated[
        tuple[str, ...],
        Setting(
            "strategies that it may choose beside auto: those that draft from tokens alone; none: autoregressive, "
            "prompt_lookup, suffix and recycling",
            name="learning_strategies",
        ),
    ] = ()
    alone: bool = True
