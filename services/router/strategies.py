"""Turns the strategy that a user names into a plan."""

from __future__ import annotations

from dataclasses import dataclass

from services.client_api import ClientRequest
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.sources import SOURCES, STRATEGIES, STRATEGY_NODES, WHERE_INDEXED
from speculation.types import AcceptanceRule, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """Defaults for requests that leave values unset, and what the server can do.

    Attributes:
        strategy: the default strategy.
        num_speculative_tokens: most drafted tokens per step; None: the strategy's own number.
        acceptance: the default acceptance rule.
        retrieval: whether there is an index; without one, strategies that need it are refused.
        semantic: whether the index can be searched by hidden states.
    """

    strategy: str = "blend"
    num_speculative_tokens: int | None = None
    acceptance: AcceptanceRule = "walk"
    retrieval: bool = False
    semantic: bool = False


def served(*, retrieval: bool, semantic: bool = False) -> tuple[str, ...]:
    """The strategies that a server can offer.

    Args:
        retrieval: it has a retrieval index.
        semantic: the index can be searched by hidden states.
    """
    return tuple(
        name for name in STRATEGIES if (retrieval or not _needs_index(name)) and (semantic or not _needs_states(name))
    )


def check_default(config: StrategyConfig) -> None:
    """Check the defaults at start.

    Raises:
        ConfigurationError: the strategy is unknown or needs an index that is not there, or num_speculative_tokens is out of
            range.
    """
    if config.strategy not in STRATEGIES:
        raise ConfigurationError(f"strategy is {config.strategy}: must be one of {_known()}")
    if _needs_states(config.strategy) and not config.semantic:
        raise ConfigurationError(
            f"strategy is {config.strategy}, which needs an index built with --semantic: set retrieval.semantic"
        )
    if _needs_index(config.strategy) and not config.retrieval:
        raise ConfigurationError(f"strategy is {config.strategy}, which needs an index: set retrieval.index")
    nodes = config.num_speculative_tokens
    if nodes is not None and not 0 <= nodes <= limits.MAX_TREE_NODES:
        raise ConfigurationError(f"num_speculative_tokens must be from 0 to {limits.MAX_TREE_NODES}")


def make_plan(request: ClientRequest, config: StrategyConfig) -> Plan:
    """The plan for ``request``.

    Raises:
        InvalidArgument: its strategy is unknown or not served here, or num_speculative_tokens is out of range.
    """
    strategy = request.strategy if request.strategy is not None else config.strategy
    if strategy not in STRATEGIES:
        raise InvalidArgument("speculation.strategy", strategy or "empty", f"one of {_known()}")
    usable = served(retrieval=config.retrieval, semantic=config.semantic)
    if strategy not in usable:
        lacks = "no retrieval index" if not config.retrieval else "no index of hidden states"
        raise InvalidArgument(
            "speculation.strategy", strategy, f"one of {', '.join(sorted(usable))}; this server has {lacks}"
        )
    nodes = request.num_speculative_tokens
    if nodes is not None and not 0 <= nodes <= limits.MAX_TREE_NODES:
        raise InvalidArgument("speculation.num_speculative_tokens", nodes, f"from 0 to {limits.MAX_TREE_NODES}")
    if nodes is None:
        nodes = config.num_speculative_tokens
    if nodes is None:
        nodes = _suitable_nodes(strategy)
    sources = _sources(strategy, config)
    specs = [SOURCES[source] for source in sources]
    return Plan(
        strategy=strategy,
        sources=sources,
        max_nodes=nodes if sources else 0,
        acceptance=request.acceptance or config.acceptance,
        observe_top_k=max((spec.top_k for spec in specs), default=0),
        observe_layers=tuple(sorted({layer for spec in specs for layer in spec.layers})),
        observe_prompt=any(spec.prompt_features for spec in specs),
    )


def _suitable_nodes(strategy: str) -> int:
    suits = max((SOURCES[source].nodes for source in STRATEGIES[strategy]), default=0)
    return STRATEGY_NODES.get(strategy, suits)


def _sources(strategy: str, config: StrategyConfig) -> tuple[str, ...]:
    """A strategy's sources, and the optional ones that the server's index makes possible."""
    besides = [
        source
        for source in WHERE_INDEXED.get(strategy, ())
        if config.retrieval and (config.semantic or not SOURCES[source].layers)
    ]
    return (*STRATEGIES[strategy], *besides)


def _needs_index(strategy: str) -> bool:
    return any(SOURCES[source].retrieval for source in STRATEGIES[strategy])


def _needs_states(strategy: str) -> bool:
    """Whether the strategy searches the index by hidden states."""
    return any(SOURCES[source].retrieval and SOURCES[source].layers for source in STRATEGIES[strategy])


def _known() -> str:
    return ", ".join(sorted(STRATEGIES))
