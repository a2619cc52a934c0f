"""Replays an answer under other strategies: how many passes it would have taken, and how long."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from services.verifier.comparing.side_sessions import Replies, SideSessions
from services.verifier.engine.origins import Origin
from speculation import limits
from speculation.budget import Budget
from speculation.costs import Load
from speculation.errors import MalformedTree, OutriderError, Unavailable
from speculation.messages import Draft, GenerationRequest, ReplayedAnswer
from speculation.replay import AnswerReplay
from speculation.tree import prune, validate
from speculation.types import EMPTY_TREE, Plan, TokenTree

log = logging.getLogger(__name__)

# Of a plain answer's passes, so many are added up before anybody else has a turn of the event loop.
_AT_ONCE = 512
# Longest that a request's comparisons may take, those that it waits for included, in seconds.
MOST_S = 5.0
_UNKNOWN = ReplayedAnswer(num_passes=None, seconds=None)


class Comparing:
    """Replays answers one at a time, so that live requests lose little time at the drafter.

    Args:
        origins: where the loop's drafts come from.
        budget: the loop's. It says what of each draft a pass would check, and what that takes; it learns nothing here.
        vocab_size: of the target.

    Attributes:
        origins: what the loop must use instead of ``origins``.
    """

    def __init__(self, origins: Sequence[Origin], budget: Budget, vocab_size: int) -> None:
        self._links = {origin.name: SideSessions(origin.link) for origin in origins}
        self.origins = [replace(origin, link=self._links[origin.name]) for origin in origins]
        self._budget = budget
        self._vocab_size = vocab_size
        self._turn = asyncio.Lock()

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        """One comparison for each plan. What is not done in time, or cannot be drafted, is not known.

        Every strategy decodes alone, with no memory of earlier requests; each of its drafts is waited for.

        Args:
            request: its ``committed`` is the whole answer.
        """
        found: list[ReplayedAnswer] = []
        try:
            async with asyncio.timeout(MOST_S), self._turn:
                for number, plan in enumerate(plans):
                    found.append(await self._compare(replace(request, request_id=f"{request.request_id}.{number}"), plan))
        except TimeoutError:
            log.info("request %s: %d of %d comparisons in %g s", request.request_id, len(found), len(plans), MOST_S)
        return (*found, *[_UNKNOWN] * (len(plans) - len(found)))

    async def _compare(self, request: GenerationRequest, plan: Plan) -> ReplayedAnswer:
        try:
            return await (self._drafted(request, plan) if plan.speculates else self._plain(request))
        except OutriderError as error:
            log.info("request %s: no comparison with %s: %s", request.request_id, plan.strategy, error)
            return _UNKNOWN

    async def _plain(self, request: GenerationRequest) -> ReplayedAnswer:
        """Without drafts: a pass for each token, the first one with the prompt's."""
        first, last, seconds = len(request.prompt), len(request.prompt) + len(request.committed) - 1, 0.0
        for begin in range(first, last, _AT_ONCE):
            seconds += sum(self._budget.seconds(_load(keys)) for keys in range(begin, min(last, begin + _AT_ONCE)))
            await asyncio.sleep(0)
        return _comparison(len(request.committed), seconds)

    async def _drafted(self, request: GenerationRequest, plan: Plan) -> ReplayedAnswer:
        origin = next((each for each in self.origins if each.serves(plan.sources) == plan.sources), None)
        if origin is None or not origin.link.connected:
            raise Unavailable("no drafter is connected that has its sources")
        # It counts passes without nodes, for what it tries now and then.
        budget = copy.copy(self._budget)
        nodes = min(plan.max_nodes, budget.max_nodes)
        answer = AnswerReplay(request.request_id, (*request.prompt, *request.committed), len(request.prompt), nodes)
        sampling = request.sampling
        with self._links[origin.name].session(request.request_id) as replies:
            origin.link.open(
                answer.opening(sources=plan.sources, temperature=sampling.temperature, prediction=request.prediction)
            )
            await _draft_for(answer.length, replies)
            # The first token comes with the pass over the prompt, which waits for no draft.
            report = answer.accept(EMPTY_TREE)
            passes, seconds = 1, 0.0
            while not answer.over:
                load = _load(answer.length - 1)
                origin.link.step(replace(report, min_probability=budget.wanted(load).min_probability))
                draft = await _draft_for(answer.length, replies)
                left = sampling.max_tokens - (answer.length - len(request.prompt))
                tree = self._chosen(draft.tree, nodes, left - 1, budget, load)
                seconds += draft.drafting_s + budget.seconds(load.plus(len(tree)))
                report = answer.accept(tree)
                passes += 1
        return _comparison(passes, seconds)

    def _chosen(self, tree: TokenTree, nodes: int, depth: int, budget: Budget, load: Load) -> TokenTree:
        """What a pass would check of a draft.

        Raises:
            Unavailable: the draft is malformed.
        """
        try:
            validate(tree, vocab_size=self._vocab_size, max_nodes=limits.MAX_TREE_NODES)
        except MalformedTree as error:
            raise Unavailable(f"a draft is malformed: {error}") from error
        (chosen,) = budget.choose([prune(tree, nodes, depth, budget.probabilities(tree))], load, load)
        return chosen


async def _draft_for(length: int, replies: Replies) -> Draft:
    """The draft for a prefix of so many tokens. Others are of earlier ones, or made ahead.

    Raises:
        Unavailable: there is none.
    """
    while True:
        reply = await replies.get()
        if not isinstance(reply, Draft):
            raise Unavailable(f"the drafter says: {reply.reason}")
        if reply.base_length == length and not reply.assumed:
            return reply


def _load(keys: int) -> Load:
    """One request that decodes alone, after so many computed tokens."""
    return Load(rows=1, requests=1, keys=keys, row_keys=keys)


def _comparison(passes: int, seconds: float) -> ReplayedAnswer:
    return ReplayedAnswer(num_passes=passes, seconds=seconds if math.isfinite(seconds) else None)
