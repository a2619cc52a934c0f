"""What strategies a server offers, what a request may name of them, and which sources that means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from services.api.messages import ClientRequest
from services.router.drafters import Drafters, registered, suited_to, usable_by
from services.router.rules.facts import Facts
from services.settings import Setting
from services.wrong_values import did_you_mean
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.held_models import HeldModel
from speculation.sources import (
    AUTO,
    BLEND,
    LISTED,
    SOURCES,
    STRATEGIES,
    WHERE_INDEXED,
    WHERE_TRAINED,
    SourceSpec,
    kind_of,
    runs_model,
)
from speculation.types import AcceptanceRule, Effort

# Most models that draft for one request; the first ones count.
_MOST_MODELS = 8
# What vLLM and SGLang call strategies that have another name here.
_ELSEWHERE = {
    "ngram": "prompt_lookup",
    "dspark": "dflash",
    "standalone": "draft_model",
    "nextn": "mtp",
    "frozen_kv_mtp": "mtp",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """Defaults for requests that leave values unset, and what the server can do.

    Attributes:
        retrieval: whether there is an index; without one, strategies that need it are refused.
        semantic: whether the index can be searched by hidden states.
        trained: the models that draft here.
        registers: others may draft, too: drafters outside of the service tell what they hold once they are connected.
    """

    strategy: Annotated[str, Setting("strategy of requests that name none, such as auto, blend or autoregressive")] = AUTO
    num_speculative_tokens: Annotated[
        int | None,
        Setting(
            "most drafted tokens in a step of requests that say none; null: the strategy's own number",
            ge=0,
            le=limits.MAX_TREE_NODES,
        ),
    ] = None
    acceptance: Annotated[
        AcceptanceRule,
        Setting(
            "acceptance rule of requests that name none; walk: drafted tokens that the target also chooses; rejection: "
            "rejection sampling, where answers depend on what drafters say"
        ),
    ] = "walk"
    effort: Annotated[
        Effort | None,
        Setting(
            "how much is drafted for requests that do not say; paper: every step waits for a draft and checks all of it; "
            "measured: as far as that makes answers faster; null: measured for auto and blend, paper for strategies with "
            "another name"
        ),
    ] = None
    retrieval: bool = False
    semantic: bool = False
    trained: Drafters = ()
    registers: bool = False

    def with_held(self, held: Iterable[HeldModel] | None) -> StrategyConfig:
        """What the server can do now.

        Args:
            held: what its drafters hold; None: nobody has told.
        """
        return replace(self, trained=self.trained if held is None else registered(self.trained, held), registers=False)

    def for_tenant(self, tenant: str | None) -> StrategyConfig:
        """What the server can do for a tenant."""
        return replace(self, trained=usable_by(self.trained, tenant))

    def for_request(self, facts: Facts) -> StrategyConfig:
        """What the server can do for a request."""
        return replace(self, trained=suited_to(self.trained, facts))

    def drafting_with(self, drafter: str) -> StrategyConfig:
        """What the server can do with this drafter alone.

        Raises:
            InvalidArgument: there is none of this name that the request may use; names those.
        """
        named = [each for each in self.trained if each.name == drafter]
        if not named:
            names = ", ".join(each.name for each in self.trained)
            allowed = f"one of {names}" if names else "unset: no model drafts here"
            raise InvalidArgument("speculation.drafter", drafter or "empty", allowed)
        return replace(self, trained=(replace(named[0], blended=True, only_named=False),))


def served(config: StrategyConfig) -> tuple[str, ...]:
    """The strategies that a server can offer."""
    return tuple(name for name in STRATEGIES if _lacks(name, config) is None)


def check_default(config: StrategyConfig) -> None:
    """Check the defaults at start.

    Raises:
        ConfigurationError: the strategy is unknown or needs an index or a model that is not there for all requests, or
            num_speculative_tokens is out of range.
    """
    if config.strategy not in STRATEGIES:
        raise ConfigurationError(field="router.strategy", value=config.strategy, allowed=_known(config.strategy))
    if (lack := _lacks(config.strategy, config)) is not None:
        raise ConfigurationError(
            f"set {lack.setting}", field="router.strategy", value=config.strategy, given=f"which needs {lack.needs}"
        )
    for_all = replace(config, trained=tuple(each for each in config.trained if not each.tenants and not each.when))
    if _lacks(config.strategy, for_all) is not None:
        raise ConfigurationError(
            "name one in drafter.models without tenants and when",
            field="router.strategy",
            value=config.strategy,
            given="whose models only some requests may use",
        )
    nodes = config.num_speculative_tokens
    if nodes is not None and not 0 <= nodes <= limits.MAX_TREE_NODES:
        raise ConfigurationError(
            field="router.num_speculative_tokens", value=nodes, allowed=f"from 0 to {limits.MAX_TREE_NODES}"
        )


def check_named(request: ClientRequest, config: StrategyConfig) -> None:
    """Check what a request says itself of its drafter, its strategy and its nodes.

    Raises:
        InvalidArgument: there is no such drafter, its strategy or a source is unknown or not served here, it names sources
            and another strategy than blend, or num_speculative_tokens is out of range.
    """
    if request.drafter is not None:
        config = config.drafting_with(request.drafter)
    if request.sources is not None:
        if request.strategy not in (None, BLEND):
            named = ", ".join(request.sources)
            allowed = f"unset with the strategy {request.strategy}: only {BLEND} takes a list"
            raise InvalidArgument("speculation.sources", named, allowed)
        listed_sources(request.sources, config)
    if (strategy := request.strategy) is not None:
        if strategy not in STRATEGIES:
            raise InvalidArgument("speculation.strategy", strategy or "empty", _known(strategy))
        if (lack := _lacks(strategy, config)) is not None:
            usable = ", ".join(sorted(served(config)))
            raise InvalidArgument("speculation.strategy", strategy, f"one of {usable}; this server has {lack.has}")
    nodes = request.num_speculative_tokens
    if nodes is not None and not 0 <= nodes <= limits.MAX_TREE_NODES:
        raise InvalidArgument("speculation.num_speculative_tokens", nodes, f"from 0 to {limits.MAX_TREE_NODES}")


def sources_of(strategy: str, config: StrategyConfig) -> tuple[str, ...]:
    """A strategy's sources, and the optional ones that the server's index and models make possible."""
    own = [source for kind in STRATEGIES[strategy] for source in _models(kind, config)[:1] or (kind,)]
    indexed = [source for source in WHERE_INDEXED.get(strategy, ()) if _source_lacks(SOURCES[source], config) is None]
    kinds = WHERE_TRAINED.get(strategy, ())
    blended = replace(config, trained=tuple(each for each in config.trained if each.blended))
    trained = [source for kind in kinds for source in _models(kind, blended)]
    return (*own, *indexed, *trained[:_MOST_MODELS])


def listed_sources(names: Sequence[str], config: StrategyConfig) -> tuple[str, ...]:
    """The sources that a list names, in its order.

    Args:
        names: each that of a strategy with one source, of a source, or of a source and the model that it runs.

    Raises:
        InvalidArgument: a name is unknown, not served here, or means a source that another one means; or they are too many.
    """
    field, most = "speculation.sources", limits.MAX_LISTED_SOURCES
    if not 1 <= len(names) <= most:
        raise InvalidArgument(field, f"{len(names)} sources", f"1 to {most} sources, or unset")
    models, found = {each.source for each in config.trained}, dict[str, str]()
    if config.registers:
        models |= {name for name in names if name != kind_of(name) and runs_model(name)}
    for name in names:
        kind = kind_of(name) if name in models else LISTED.get(name)
        lack = None if kind is None else _source_lacks(SOURCES[kind], config)
        if kind is None or (lack is not None and name not in models):
            usable = sorted({each for each, own in LISTED.items() if _source_lacks(SOURCES[own], config) is None} | models)
            why = "" if lack is None else f"; this server has {lack.has}"
            raise InvalidArgument(field, name or "empty", f"one of {', '.join(usable)}{why or did_you_mean(name, usable)}")
        source = name if name in models else next(iter(_models(kind, config)), kind)
        if source in found:
            raise InvalidArgument(field, name, f"left out: {found[source]} is the same source")
        found[source] = name
    return tuple(found)


def _models(kind: str, config: StrategyConfig) -> tuple[str, ...]:
    """The sources with models of a kind that draft for requests which do not name them."""
    return tuple(each.source for each in config.trained if each.kind == kind and not each.only_named)


@dataclass(frozen=True, slots=True)
class _Lack:
    """Something that a server does not have: how a setting's error and a request's error say so."""

    needs: str
    setting: str
    has: str


_NO_INDEX = _Lack("an index", "retrieval.index", "no retrieval index")
_NO_STATES = _Lack("an index built with --semantic", "retrieval.semantic", "no index of hidden states")


def _lacks(strategy: str, config: StrategyConfig) -> _Lack | None:
    """What the server lacks for a strategy; None: nothing."""
    lacks = (_source_lacks(SOURCES[source], config) for source in STRATEGIES[strategy])
    return next((lack for lack in lacks if lack is not None), None)


def _source_lacks(spec: SourceSpec, config: StrategyConfig) -> _Lack | None:
    if spec.retrieval and not config.retrieval:
        return _NO_INDEX
    if spec.retrieval and spec.layers and not config.semantic:
        return _NO_STATES
    if spec.kind == "model" and not _models(spec.name, config) and not config.registers:
        return _Lack(f"a checkpoint of {spec.name}", "drafter.models", f"no checkpoint of {spec.name}")
    return None


def _known(strategy: str) -> str:
    name = strategy.lower()
    meant = name if name in STRATEGIES else _ELSEWHERE.get(name)
    hint = f"; {strategy} of other servers is {meant}" if meant else ""
    return f"one of {', '.join(sorted(STRATEGIES))}{hint or did_you_mean(name, STRATEGIES)}"
