"""How other strategies would have drafted an answer: which of them a request may name, and what it is told of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.api.messages import ClientRequest
from services.api.origins import ComparedStrategy
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig, served
from speculation import limits
from speculation.errors import InvalidArgument, OutriderError
from speculation.messages import GenerationRequest
from speculation.ports import VerifierPort
from speculation.sources import SOURCES, STRATEGIES, WHERE_PREDICTED, kind_of, runs_model
from speculation.types import Plan

log = logging.getLogger(__name__)

_FIELD = "speculation.compare"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedComparison:
    """A strategy that an answer is to be compared with.

    Attributes:
        plan: with the sources that can be replayed; ``without`` are the others.
    """

    plan: Plan
    without: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether a replay tells its drafters all that passes would."""
        return not self.without and not any(SOURCES[kind_of(name)].top_k for name in self.plan.sources)


def plan_comparisons(request: ClientRequest, config: StrategyConfig) -> tuple[PlannedComparison, ...]:
    """The strategies that a request wants its answer to be compared with.

    Raises:
        InvalidArgument: there are too many, or one of them is unknown, named twice, not served here or not replayed.
    """
    names, config = request.compare, config.for_tenant(request.tenant)
    if len(names) > limits.MAX_COMPARED:
        raise InvalidArgument(_FIELD, f"{len(names)} strategies", f"at most {limits.MAX_COMPARED} strategies")
    if len(set(names)) < len(names):
        raise InvalidArgument(_FIELD, next(name for name in names if names.count(name) > 1), "strategies, each once")
    return tuple(_planned(request, name, config) for name in names)


def _planned(request: ClientRequest, name: str, config: StrategyConfig) -> PlannedComparison:
    predicted = request.prediction if name in WHERE_PREDICTED else ""
    asked = replace(
        request,
        strategy=name,
        num_speculative_tokens=None,
        drafter=None,
        prediction=predicted,
        group="",
        report="none",
    )
    try:
        plan = make_plan(asked, config)
    except InvalidArgument as error:
        raise InvalidArgument(_FIELD, error.value, error.allowed) from error
    kept = tuple(source for source in plan.sources if _replayed(source))
    if plan.sources and not kept:
        usable = [each for each in sorted(served(config)) if not STRATEGIES[each] or any(map(_replayed, STRATEGIES[each]))]
        raise InvalidArgument(
            _FIELD, name, f"one of {', '.join(usable)}: models that draft are not run again, nor are hidden states kept"
        )
    without = tuple(source for source in plan.sources if source not in kept)
    return PlannedComparison(plan=replace(plan, sources=kept, acceptance="walk"), without=without)


def _replayed(source: str) -> bool:
    """Whether a source drafts from tokens, and not with a model or from the target's hidden states."""
    return not runs_model(source) and not SOURCES[source].layers


async def compared(
    verifier: VerifierPort, request: GenerationRequest, answer: Sequence[int], planned: Sequence[PlannedComparison]
) -> tuple[ComparedStrategy, ...]:
    """An answer's comparisons; what the verifier cannot say is not known, and the answer is as good without."""
    try:
        found = await verifier.compare(replace(request, committed=tuple(answer)), [each.plan for each in planned])
    except OutriderError as error:
        log.warning("request %s: no comparisons: %s", request.request_id, error)
        found = ()
    told = []
    for number, each in enumerate(planned):
        passes, seconds = (found[number].num_passes, found[number].seconds) if number < len(found) else (None, None)
        told.append(
            ComparedStrategy(
                strategy=each.plan.strategy,
                num_passes=passes,
                tokens_per_pass=len(answer) / passes if passes else None,
                seconds=seconds,
                exact=each.exact and request.sampling.structured_outputs is None,
                without=each.without,
            )
        )
    return tuple(told)
