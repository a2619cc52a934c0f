"""The strategies that users can name, and the plan that each stands for."""

from __future__ import annotations

from dataclasses import dataclass

from services.client_api import ClientRequest
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.sources import SOURCES
from speculation.types import AcceptanceRule, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """What is used where a request does not say.

    Attributes:
        strategy: the default strategy.
        num_speculative_tokens: most drafted tokens per step; None: what suits the strategy.
        acceptance: the default rule.
        retrieval: whether there is an index; without, strategies that need one are refused.
        semantic: whether hidden states can be looked up in it.
    """

    strategy: str = "blend"
    num_speculative_tokens: int | None = None
    acceptance: AcceptanceRule = "walk"
    retrieval: bool = False
    semantic: bool = False


# A strategy is a set of sources. Plain decoding is the empty set: it needs no drafter at all.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    "prompt_lookup": ("prompt_lookup",),
    "suffix": ("suffix",),
    "recycling": ("recycling",),
    "blend": ("suffix", "recycling"),
    "anpd": ("anpd",),
    "lookahead": ("lookahead",),
    "spectra_core": ("spectra_core",),
    "spectra": ("spectra",),
    "spectra_retrieval": ("retrieval",),
    "rest": ("retrieval",),
    "semantic": ("semantic",),
}
# These are nothing without an index; `blend` takes its hits where there is one.
_NEED_RETRIEVAL = ("spectra", "spectra_retrieval", "rest")
# And these not without the hidden states in it; `blend` takes those hits, too.
_NEED_STATES = ("semantic",)
# Drafted tokens per step: trees with branches need more of them than chains do.
_NODES = {"prompt_lookup": 8, "suffix": 16, "anpd": 8, "lookahead": 120, "spectra_core": 120, "spectra": 120, "rest": 64}
_NODES_OF_TREES = 32
# How many of the target's likeliest next tokens a source wants to be told of, after every verified node.
_OBSERVED = {"recycling": 8, "lookahead": 1, "spectra_core": 8, "spectra": 8}


def served(*, retrieval: bool, semantic: bool = False) -> tuple[str, ...]:
    """The strategies of a server with a retrieval index, or without one; with hidden states in it, or without them."""
    missing = (() if retrieval else _NEED_RETRIEVAL) + (() if semantic else _NEED_STATES)
    return tuple(name for name in STRATEGIES if name not in missing)


def check_default(config: StrategyConfig) -> None:
    """Check a default strategy at start.

    Raises:
        ConfigurationError: there is no such strategy, or the draft length is out of range.
    """
    if config.strategy not in STRATEGIES:
        raise ConfigurationError(f"strategy is {config.strategy}: must be one of {_known()}")
    if config.strategy in _NEED_RETRIEVAL and not config.retrieval:
        raise ConfigurationError(f"strategy is {config.strategy}, which needs an index: set retrieval.index")
    if config.strategy in _NEED_STATES and not config.semantic:
        raise ConfigurationError(
            f"strategy is {config.strategy}, which needs an index built with --semantic: set retrieval.semantic"
        )
    nodes = config.num_speculative_tokens
    if nodes is not None and not 0 <= nodes <= limits.MAX_TREE_NODES:
        raise ConfigurationError(f"num_speculative_tokens must be from 0 to {limits.MAX_TREE_NODES}")


def make_plan(request: ClientRequest, config: StrategyConfig) -> Plan:
    """The plan for ``request``.

    Raises:
        InvalidArgument: it names an unknown strategy, or too many nodes.
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
        nodes = _NODES.get(strategy, _NODES_OF_TREES)
    sources = STRATEGIES[strategy]
    if strategy == "blend" and config.retrieval:
        sources = (*sources, "retrieval", *(("semantic",) if config.semantic else ()))
    return Plan(
        strategy=strategy,
        sources=sources,
        max_nodes=nodes if sources else 0,
        acceptance=request.acceptance or config.acceptance,
        observe_top_k=max((_OBSERVED.get(source, 0) for source in sources), default=0),
        observe_layers=tuple(sorted({layer for source in sources for layer in SOURCES[source].layers})),
    )


def _known() -> str:
    return ", ".join(sorted(STRATEGIES))
