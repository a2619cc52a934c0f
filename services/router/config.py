"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.strategies import StrategyConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """A router: the model's tokeniser, and the default strategy."""

    model_path: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
