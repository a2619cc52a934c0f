"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.strategies import StrategyConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Settings of one router.

    Attributes:
        model_path: folder of the model whose tokeniser is used.
        strategy: settings of the strategies.
    """

    model_path: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
