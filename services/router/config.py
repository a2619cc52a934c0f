"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from services.router.learning.config import LearningConfig
from services.router.strategies import StrategyConfig
from services.settings import Setting
from speculation.messages import VerifierCard


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterWaits:
    """Seconds that a router waits before it tells or asks verifiers again.

    Attributes:
        migration_s: before each further attempt at a request; the last one is repeated for a request that a verifier had
            begun.
        joining_s: between looks for verifiers that have started during a pause.
        keeping_s: before verifiers that have replaced their weights are told once more to keep them: one that has not heard
            of it would go back.
        beat_s: between words to verifiers that the router is there: one that reads its weights sooner than others waits for
            them.
    """

    migration_s: tuple[float, ...] = (0.1, 1.0, 3.0)
    joining_s: float = 1.0
    keeping_s: float = 1.0
    beat_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Settings of one router.

    Attributes:
        model_path: folder of the model whose tokeniser is used.
        strategy: settings of the strategies.
        names: what the model is called by users, the first name in answers; none: as its verifier calls it.
        generic_tools: tools that the model's chat template has no place for are shown in a form of our own.
        thoughts: what the model thinks before it answers is told apart from the answer, where it marks it.
        loads_adapters: adapters may be loaded while serving.
        tokenizer: digest of the tokenizer, for verifiers with settings of their own; empty: they are not told.
        learning: what is learnt of requests that nobody chooses a strategy for.
        waits: between tries.
    """

    model_path: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    generic_tools: bool = True
    thoughts: bool = True
    names: tuple[str, ...] = ()
    loads_adapters: bool = False
    tokenizer: str = ""
    learning: LearningConfig = field(default_factory=LearningConfig)
    waits: RouterWaits = RouterWaits()
    rules: Annotated[
        tuple[dict[str, Any], ...],
        Setting("rules that choose how requests are drafted which do not say; the first that matches counts"),
    ] = ()
    rules_file: Annotated[
        Path | None,
        Setting("YAML list of such rules, which is read again when it changes; instead of rules"),
    ] = None
    migration_timeout_s: Annotated[
        float,
        Setting(
            "longest time in seconds that an answer begun waits for a verifier to come back after its own was lost",
            ge=0,
            le=86_400,
        ),
    ] = 300.0

    def names_of(self, card: VerifierCard) -> tuple[str, ...]:
        """What users call a verifier's model, the name in answers first."""
        return self.names or (card.model,)
