"""Makes the plan of a request: which sources draft for it, how many nodes, and by which rule they are accepted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.api.messages import ClientRequest
from services.router.drafters import TrainedDrafter
from services.router.strategies import StrategyConfig, check_named, listed_sources, served, sources_of
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.sources import (
    BLEND,
    FROM_ANSWERS,
    LISTED,
    MEASURED,
    SOURCES,
    STRATEGIES,
    STRATEGY_NODES,
    WHERE_PREDICTED,
    WHERE_TRAINED,
    kind_of,
)
from speculation.types import Effort, Plan


def make_plan(request: ClientRequest, config: StrategyConfig) -> Plan:
    """The plan for ``request``.

    Raises:
        InvalidArgument: its strategy or a source is unknown or not served here, reads an index although the request is
            private, or drafts nothing with its drafter, or from its prediction or its group; or num_speculative_tokens is
            out of range.
    """
    check_named(request, config)
    strategy = _strategy_of(request, config)
    if request.drafter is not None:
        config = config.drafting_with(request.drafter)
        _check_drafter(config.trained[0], strategy, request.sources)
    nodes, sources = _nodes_of(request, config, strategy), _sources_of(request, config, strategy)
    if request.prediction:
        sources = (_predicted(strategy, request.prediction, nodes), *sources)
    if request.group:
        _check_group(request.group, strategy, sources, nodes)
    specs = [SOURCES[kind_of(source)] for source in sources]
    return Plan(
        strategy=strategy,
        sources=sources,
        max_nodes=nodes if sources else 0,
        acceptance=request.acceptance or config.acceptance,
        observe_top_k=max((spec.top_k for spec in specs), default=0),
        observe_layers=tuple(sorted({layer for source in sources for layer in _layers_of(source, config)})),
        observe_prompt=any(spec.prompt_features for spec in specs),
        report_passes=request.report == "trees",
        effort=request.effort or config.effort or _usual_effort(request, strategy),
    )


def _strategy_of(request: ClientRequest, config: StrategyConfig) -> str:
    if request.sources is not None:
        return BLEND
    return config.strategy if request.strategy is None else request.strategy


def _nodes_of(request: ClientRequest, config: StrategyConfig, strategy: str) -> int:
    for said in (request.num_speculative_tokens, config.num_speculative_tokens):
        if said is not None:
            return said
    return max(map(_suitable_nodes, request.sources or (strategy,)))


def _sources_of(request: ClientRequest, config: StrategyConfig, strategy: str) -> tuple[str, ...]:
    """The sources that may draft for a request: a private one reads no index."""
    if request.sources is not None:
        listed = listed_sources(request.sources, config)
        if request.private:
            _check_private(request.sources)
        return listed
    sources = sources_of(strategy, config)
    if not request.private:
        return sources
    sources = tuple(source for source in sources if not SOURCES[kind_of(source)].retrieval)
    if STRATEGIES[strategy] and not sources:
        usable = ", ".join(sorted(name for name in served(config) if not all(_reads_index(name))))
        raise InvalidArgument("speculation.strategy", strategy, f"one of {usable} with privacy: strict")
    return sources


def _layers_of(source: str, config: StrategyConfig) -> tuple[int, ...]:
    model = next((each for each in config.trained if each.source == source), None)
    return SOURCES[source].layers if model is None else model.layers


def _check_drafter(drafter: TrainedDrafter, strategy: str, listed: Sequence[str] | None) -> None:
    """Refuse a drafter that would be ignored."""
    if listed is not None:
        if drafter.kind not in map(kind_of, listed):
            raise InvalidArgument("speculation.drafter", drafter.name, f"unset, or sources that name {drafter.kind} as well")
        return
    using = (*WHERE_TRAINED, drafter.kind)
    if strategy not in using:
        shown = ", ".join(using)
        raise InvalidArgument(
            "speculation.drafter", drafter.name, f"unset with the strategy {strategy}: only {shown} draft with it"
        )


def _usual_effort(request: ClientRequest, strategy: str) -> Effort:
    """Who names a strategy, or sources, wants these; ``auto`` and ``blend`` are for who wants the fastest answer."""
    return "measured" if strategy in MEASURED and request.sources is None else "paper"


def _predicted(strategy: str, prediction: str, nodes: int) -> str:
    """The source that drafts from a prediction."""
    shown = f"{len(prediction)} characters"
    if strategy not in WHERE_PREDICTED:
        using = " and ".join(WHERE_PREDICTED)
        raise InvalidArgument("prediction", shown, f"unset with the strategy {strategy}: only {using} draft from it")
    if not nodes:
        raise InvalidArgument("prediction", shown, "unset where num_speculative_tokens is 0: nothing is drafted")
    return WHERE_PREDICTED[strategy]


def _check_group(group: str, strategy: str, sources: Collection[str], nodes: int) -> None:
    """Refuse a group that would be ignored."""
    field, most = "speculation.group", limits.MAX_GROUP_CHARACTERS
    if len(group) > most:
        raise InvalidArgument(field, f"{len(group)} characters", f"at most {most} characters")
    if FROM_ANSWERS.isdisjoint(sources):
        using = ", ".join(sorted(name for name, own in STRATEGIES.items() if not FROM_ANSWERS.isdisjoint(own)))
        raise InvalidArgument(field, group, f"unset with the strategy {strategy}: only {using} draft from other answers")
    if not nodes:
        raise InvalidArgument(field, group, "unset where num_speculative_tokens is 0: nothing is drafted")


def _reads_index(strategy: str) -> list[bool]:
    """Whether each of a strategy's own sources reads what others have written; plain decoding does not."""
    return [SOURCES[source].retrieval for source in STRATEGIES[strategy]] or [False]


def _suitable_nodes(name: str) -> int:
    """Most nodes per step for a strategy, or for a name in a list of sources."""
    own = STRATEGIES.get(name, (kind_of(name),))
    return STRATEGY_NODES.get(name, max((SOURCES[source].nodes for source in own), default=0))


def _check_private(listed: Sequence[str]) -> None:
    """Refuse sources that a private request may not use."""
    if reading := [name for name in listed if SOURCES[LISTED[kind_of(name)]].retrieval]:
        raise InvalidArgument("speculation.sources", reading[0], "left out with privacy: strict, as it reads an index")
