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
        migration_timeout_s: longest time that an answer begun waits for a verifier to come back after its own was lost.
    """

    model_path: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    migration_timeout_s: float = 60.0
