"""What the router learns of requests that nobody has chosen a strategy for, and what it chooses for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.api.messages import ClientRequest, RequestedSampling
from services.metrics.registry import DROPPED, Metrics
from services.router.comparisons import plan_comparisons
from services.router.learning.choice import LearntChoice, choose, why_left
from services.router.learning.config import USUAL, LearningConfig
from services.router.learning.contexts import Context, context_of
from services.router.learning.counts import Costs, Counts
from services.router.learning.shared_counts import SharedCounts
from services.router.learning.spare_time import SpareTime
from services.router.plans import make_plan
from services.router.rules.facts import Facts
from services.router.strategies import StrategyConfig, served
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import GenerationRequest, ReplayedAnswer
from speculation.ports import VerifierPort
from speculation.sources import AUTO
from speculation.types import Plan, SpeculationStats

PLAIN = "autoregressive"
# Those that every choice is compared with.
_ALWAYS = (AUTO, PLAIN)
# Tokens of the shortest answer that is replayed: of fewer, next to nothing can be drafted.
_FEWEST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What was chosen for a request, and what must be known to learn from its answer."""

    context: Context
    choice: LearntChoice
    plan: Plan
    request: ClientRequest


class Learning:
    """Chooses strategies by their costs in a request's context, and learns these from answers that it has replayed.

    Nothing of a text is kept beyond the replay of its answer: only sums, and the names of tenants, kinds and strategies.

    Args:
        config: must be on.
        strategy: the router's.

    Raises:
        ConfigurationError: a strategy is not served or cannot be replayed, the settings leave nothing to choose, or the URL
            of Redis is malformed.
    """

    def __init__(
        self, config: LearningConfig, strategy: StrategyConfig, verifier: VerifierPort, metrics: Metrics = DROPPED
    ) -> None:
        check_learning(config, strategy)
        self._config, self._strategy, self._verifier = config, strategy, verifier
        self._names = config.strategies or tuple(name for name in USUAL if name in served(strategy))
        self._choices = metrics.counter("router_learning_choices_total")
        self._replays = metrics.counter("router_learning_replays_total")
        self.counts = Counts()
        self.spare = SpareTime(verifier)
        # Requests are planned in threads.
        self._lock = threading.Lock()
        self._shared = _shared(config, self.counts, self._lock, metrics)
        self._forgotten = 0

    def follow(self, strategy: StrategyConfig) -> None:
        """Plan by what the server can do now."""
        self._strategy = strategy

    def choose(self, request: ClientRequest, facts: Facts, prompt: Sequence[int]) -> Chosen | None:
        """The plan for a request that matches no rule; None: it is not for learning to say.

        Args:
            prompt: its token ids.
        """
        config = self._strategy.for_request(facts)
        if why_left(request, facts, config):
            return None
        context = context_of(prompt, facts)
        if not self._config.alone and self._shared is None:
            # Other routers could not be told to forget a tenant.
            context = replace(context, tenant="")
        with self._lock:
            choice = choose(self.counts, context, self._names, facts.open_requests)
            if self._shared is not None:
                self._shared.asked(context)
        self._choices.add(1, choice.strategy)
        named = request if choice.strategy == AUTO else replace(request, strategy=choice.strategy, effort="measured")
        return Chosen(context=context, choice=choice, plan=make_plan(named, config), request=request)

    def answered(
        self, chosen: Chosen, request: GenerationRequest, answer: Sequence[int], stats: SpeculationStats, answer_s: float
    ) -> None:
        """Have an answer replayed in spare time, if there is some, and learn from it.

        Args:
            answer: its tokens.
            stats: of its passes.
            answer_s: seconds that it took.
        """
        if self._shared is not None:
            self._shared.begin()
        self.spare.earn(answer_s)
        if len(answer) < _FEWEST or not self.spare.free:
            return
        done, forgotten = replace(request, committed=tuple(answer)), self._forgotten
        passes = stats.num_spec_steps if chosen.choice.strategy == AUTO else None

        async def replayed() -> None:
            found = await self._replayed(chosen.request, done)
            if forgotten == self._forgotten:
                self._learn(chosen.context, found, len(answer), passes)

        self.spare.begin(replayed)

    async def forget(self, tenant: str) -> None:
        """Delete what is known of a tenant. An answer that is being replayed teaches nothing: it may be one of it.

        Raises:
            Unavailable: costs are shared, and cannot be reached; here they are deleted.
        """
        self._forgotten += 1
        with self._lock:
            self.counts.forget(tenant)
        if self._shared is not None:
            await self._shared.forget(tenant)

    async def stop(self) -> None:
        """End what is under way."""
        await self.spare.stop()
        if self._shared is not None:
            await self._shared.close()

    async def _replayed(self, request: ClientRequest, done: GenerationRequest) -> dict[str, ReplayedAnswer]:
        """An answer under every strategy that there is a choice of.

        Raises:
            OutriderError: nothing can be said now.
        """
        planned = plan_comparisons(replace(request, compare=_compared(self._names)), self._strategy)
        plans = [each.plan for each in planned]
        found = await self._verifier.compare(done, plans)
        return {plan.strategy: each for plan, each in zip(plans, found, strict=False)}

    def _learn(self, context: Context, found: Mapping[str, ReplayedAnswer], tokens: int, passes: int | None) -> None:
        with self._lock:
            usual = self.counts.estimate(context, AUTO).cost
            if costs := costs_of(found, tokens, passes, usual):
                self.counts.learn(context, costs)
                if self._shared is not None:
                    self._shared.learn(context, costs)
        self._replays.add(1, "learnt" if costs else "unknown")


def _shared(config: LearningConfig, counts: Counts, lock: threading.Lock, metrics: Metrics) -> SharedCounts | None:
    """The exchange with other routers; None: they share nothing."""
    if config.redis_url is None:
        return None
    # Who shares nothing starts without the client of Redis.
    from services.router.learning.counts_in_redis import CountsInRedis

    return SharedCounts(counts, CountsInRedis(config.redis_url, config.scope, config.redis_password), lock, metrics)


def costs_of(found: Mapping[str, ReplayedAnswer], tokens: int, passes: int | None, usual: float) -> Costs:
    """What an answer's replays teach, in plain steps; nothing, where ``auto`` or plain decoding could not be replayed.

    A replay knows less than passes do: it reports no likeliest tokens, and remembers no earlier answer. Of the others that
    is on the safe side. Of ``auto`` it is not, so its replay counts as the share of it that its passes were.

    Args:
        found: by strategy.
        passes: that the answer itself took with ``auto``; None: another strategy was chosen.
        usual: the share that stands for it then.
    """
    plain, auto = (found.get(name) for name in (PLAIN, AUTO))
    if plain is None or auto is None or not plain.seconds or not auto.seconds or not auto.num_passes:
        return {}
    step_s = plain.seconds / (tokens - 1)
    own = usual if passes is None else min(1.0, passes / auto.num_passes)
    costs = {
        name: (each.seconds / step_s, own * auto.seconds / step_s)
        for name, each in found.items()
        if name != AUTO and each.seconds is not None
    }
    known = {} if passes is None else {AUTO: (own * auto.num_passes, float(auto.num_passes))}
    return costs | known


def check_learning(config: LearningConfig, strategy: StrategyConfig) -> None:
    """Check at start that there is something to choose.

    Raises:
        ConfigurationError: a strategy is not served or cannot be replayed, there are too many, the router's settings say
            themselves how requests are drafted, or a password is for no Redis.
    """
    if strategy.strategy != AUTO or strategy.acceptance != "walk" or strategy.effort == "paper":
        raise ConfigurationError(
            "what they say would never be changed",
            field="router.learning",
            value="true",
            given="but router.strategy, router.acceptance or router.effort leave nothing to choose",
        )
    if config.redis_password is not None and config.redis_url is None:
        raise ConfigurationError(
            "set both or neither",
            field="router.learning_redis_password",
            value="set",
            given="but not router.learning_redis_url",
        )
    asked = ClientRequest(input="", sampling=RequestedSampling(), compare=_compared(config.strategies))
    try:
        plan_comparisons(asked, strategy)
    except InvalidArgument as error:
        raise ConfigurationError(field="router.learning_strategies", value=error.value, allowed=error.allowed) from error


def _compared(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_ALWAYS, *names)))
