"""Settings of what a router learns, and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from services.settings import Setting

# Strategies that may take the place of ``auto`` where nobody says. Those with the same sources would be no other choice.
USUAL = ("autoregressive", "prompt_lookup", "suffix", "recycling")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningConfig:
    """What a router learns.

    Attributes:
        alone: there is no other router of this service.
        scope: what is learnt of, such as the model: what is learnt of another one is kept apart.
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
    redis_url: Annotated[
        str | None,
        Setting(
            "redis:// or rediss:// URL through which routers share what they have learnt, numbers and no texts; null: each "
            "learns alone, and where there are several, without telling tenants apart",
            name="learning_redis_url",
        ),
    ] = field(default=None, repr=False)
    redis_password: Annotated[
        str | None,
        Setting(
            "password of that Redis, where the URL holds none; to be set in the environment or a file alone",
            name="learning_redis_password",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    alone: bool = True
    scope: str = ""
