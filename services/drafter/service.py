"""The drafter: sessions of many requests, each with the sources that its plan names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import cast

from services.drafter.config import DrafterConfig
from services.drafter.sessions.known_states import BoundedStates
from services.drafter.sessions.model_group import ModelGroup
from services.drafter.sessions.outcomes import OutcomeRanks
from services.drafter.sessions.request import DraftedPrefix, DraftedRequest, drafted_prefix
from services.drafter.sessions.shared_answers import SharedAnswers
from services.drafter.sessions.text_drafts import TextDrafts
from services.drafter.sessions.text_group import TextGroup
from services.drafter.sessions.text_work import hash_prefix, if_still, logged, observed
from services.drafter.sessions.thread import DraftingThread
from services.drafter.sessions.together import SessionsTogether
from services.drafter.sources.catalogue import check_names, make_source
from services.drafter.sources.interfaces import Ahead, ModelSource
from services.drafter.sources.suffix import NAME as SUFFIX
from services.logs.names import log_name
from speculation.columns import DraftColumns, ReportColumns
from speculation.errors import OutriderError
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    FeatureChunk,
    ForgetTenant,
    OpenSession,
    StepReport,
)
from speculation.ports import AnswerStore, Retriever
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.sources import SOURCES, TEXT, kind_of, runs_model
from speculation.types import EMPTY_TREE, Features

log = logging.getLogger(__name__)

# Longest wait, in seconds, until the sources have forgotten a tenant; the caller is blocked meanwhile.
_FORGET_S = 2.0
# How long models are waited for at the end.
_STOP_S = 10.0
# The calibrators' weights are saved each time so many requests have ended.
_SAVE_EVERY = 16


class DrafterService:
    """Implements ``speculation.ports.Drafter``. Text sources draft in one thread, each model in a thread of its own.

    Args:
        retriever: access to the retrieval index, if there is one.
        thread: where the text sources draft; None: a thread of its own.
        answers: where answers are shared with other drafters; None: they are not.
    """

    def __init__(
        self,
        config: DrafterConfig,
        retriever: Retriever | None = None,
        thread: DraftingThread | None = None,
        answers: AnswerStore | None = None,
    ) -> None:
        self._config = config
        self._retriever = retriever
        self._thread = thread or DraftingThread("drafts-text")
        self._text = TextGroup(config)
        self._texts = TextDrafts(self._thread, retriever, config.retrieval_deadline_s)
        self._models: dict[str, ModelGroup] = {}
        self._states = BoundedStates(config.max_feature_bytes)
        self._ranks: defaultdict[str, OutcomeRanks] = defaultdict(partial(OutcomeRanks, config.draft_ahead))
        self._sessions: OrderedDict[str, DraftedRequest] = OrderedDict()
        self._together = SessionsTogether()
        self._ended = 0
        self.shared = None if answers is None else SharedAnswers(answers, self._take_answers, self._forget_text)

    @property
    def retrievals_missed(self) -> int:
        """As ``TextDrafts.retrievals_missed``."""
        return self._texts.retrievals_missed

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        start = time.perf_counter()
        try:
            check_names(message.sources, self._config)
        except OutriderError as error:
            return DraftFailure(session_id=message.session_id, reason=str(error))
        name = log_name(message.session_id, message.traceparent)
        log.info("session %s: %d tokens, %s", name, len(message.tokens), ", ".join(message.sources))
        # If it is reopened, the message brings all tokens that the old session knew.
        self._drop(message.session_id)
        texts = tuple(name for name in message.sources if not runs_model(name))
        session = DraftedRequest(
            id=message.session_id,
            tenant=message.tenant,
            models=[self._model(name) for name in message.sources if runs_model(name)],
            reads_states=any(runs_model(name) and SOURCES[kind_of(name)].layers for name in message.sources),
            prefix=drafted_prefix(length=len(message.tokens), hash=EMPTY_HASH, max_nodes=message.max_nodes, start=start),
            traceparent=message.traceparent,
        )
        self._sessions[session.id] = session
        if len(self._sessions) > self._config.max_sessions:
            forgotten = next(iter(self._sessions))
            self.close(CloseSession(session_id=forgotten))
            log.warning("dropped session %s: more than max_sessions=%d", forgotten, self._config.max_sessions)
        for group in session.models:
            group.open(message)
        session.begin(session.prefix)
        # The store knows tenants alone: what was answered with an adapter is told to no other drafter.
        if self.shared is not None and SUFFIX in message.sources and not message.adapter:
            session.answer = list(message.tokens[message.prompt_length :])
            self.shared.begin(session)
        # In the thread, since a long prompt takes a while.
        hashing = self._thread.run(hash_prefix, session.prefix, message.tokens)
        if not texts and session.models:
            await hashing
            return None
        try:
            return await self._texts.draft(session, partial(self._text.open, message, texts))
        except OutriderError as error:
            self._drop(session.id)
            return DraftFailure(session_id=session.id, reason=str(error))
        except Exception:
            self._drop(session.id)
            raise

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        session = self._advanced(message, time.perf_counter())
        if isinstance(session, DraftFailure):
            return session
        return None if session.text is None else await self._texts.draft(session, partial(observed, session.text, message))

    def at_once(self, message: StepReport) -> Draft | DraftFailure | None:
        """As ``speculation.ports.DraftsAtOnce.at_once``: for text sources alone that have read all of the prompt."""
        start = time.perf_counter()
        session = self._session(message.session_id)
        if session is None or not session.drafts_within(self._longest_at_once_s) or (text := session.text) is None:
            return None
        advanced = self._advanced(message, start)
        if isinstance(advanced, DraftFailure):
            return advanced
        text.observe(message)
        tree = text.draft(message.max_nodes)
        session.text_s = time.perf_counter() - start
        return session.draft(session.prefix, TEXT, tree)

    def together(self, reports: ReportColumns) -> DraftColumns | None:
        """As ``speculation.ports.DraftsTogether.together``: for sessions that ``at_once`` drafts for by compiled code."""
        return self._together.drafted(self._sessions, reports, self._longest_at_once_s, time.perf_counter())

    def _session(self, session_id: str) -> DraftedRequest | None:
        """A session, of which anything may be asked now."""
        if (session := self._sessions.get(session_id)) is not None:
            self._together.leave(session)
        return session

    @property
    def _longest_at_once_s(self) -> float:
        """As ``DraftingThread.longest_at_once_s``; below 0, too, where a draft waits, or others come after it."""
        return -1.0 if self._retriever is not None or self._config.draft_ahead else self._thread.longest_at_once_s

    def _advanced(self, message: StepReport, start: float) -> DraftedRequest | DraftFailure:
        """The session, told of a step's prefix and hidden states; its text sources are not yet.

        Args:
            start: when drafting began, in seconds of ``perf_counter``.
        """
        session = self._session(message.session_id)
        if session is None:
            return DraftFailure(session_id=message.session_id, reason="unknown session", reopen=True)
        prefix_hash = extend_hash(session.prefix.hash, message.committed)
        if session.prefix.length + len(message.committed) != message.length or prefix_hash != message.prefix_hash:
            self._drop(session.id)
            return DraftFailure(session_id=message.session_id, reason="a step was missed", reopen=True)
        self._sessions.move_to_end(session.id)
        for group, assumed in session.prefix.assumed.items():
            self._ranks[group].learn(assumed, message.committed)
        if session.answer is not None:
            session.answer += message.committed
        if message.observation is not None and message.observation.features is not None:
            self._keep(session, message.observation.features)
        for model in session.models:
            model.observe(message)
        session.begin(
            drafted_prefix(
                length=message.length,
                hash=prefix_hash,
                max_nodes=message.max_nodes,
                min_probability=message.min_probability,
                start=start,
            )
        )
        return session

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        """Models' drafts as they are ready, then drafts for likely outcomes of the step under way."""
        session = self._session(session_id)
        if session is None:
            return
        prefix = session.prefix
        pending = prefix.expected
        while pending:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for answer in [answer for answer in pending if answer.done()]:
                if session.prefix is not prefix:
                    return
                group, whose = pending[answer]
                if answer.cancelled():
                    # A newer request stands for this one.
                    del pending[answer]
                    continue
                tree = answer.result()
                # A tree drawn from q must stay as it is, and what the blend makes of others has no probes.
                if tree and not tree.proposals and not tree.probes and whose is prefix and session.text is not None:
                    tree = await self._texts.join(session, session.text, group, tree)
                    if session.prefix is not prefix:
                        return
                # Not before: a new step may end this, and takes over what has not been sent.
                del pending[answer]
                # An empty draft is sent, too, so that nobody waits for it, or keeps from asking for another.
                more = any(other is whose for _, other in pending.values())
                yield session.draft(whose, group, tree or EMPTY_TREE, more=more, unready=tree is None)
        if self._config.draft_ahead:
            async for ahead in self._ahead(session, prefix):
                yield ahead
        if session.text is None:
            return
        # In idle time, let the text sources read the rest of a long prompt.
        while not session.counted:
            behind: bool | None = await self._thread.run(if_still, session, prefix, session.text.catch_up, later=True)
            if behind is None:
                return
            session.counted = not behind

    async def _ahead(self, session: DraftedRequest, prefix: DraftedPrefix) -> AsyncIterator[Draft]:
        """Drafts for outcomes of the step under way: those of the text sources, then those of models."""
        asked = {
            group.name: group.ahead(session.id, prefix.max_nodes, prefix.min_probability, self._ranks[group.name].wanted())
            for group in session.models
        }
        if (text := session.text) is not None:
            outcomes = partial(text.outcomes, self._ranks[TEXT].wanted())
            for outcome in await self._thread.run(if_still, session, prefix, outcomes, later=True) or ():
                draft_after = partial(text.draft_after, outcome, prefix.max_nodes)
                tree = await self._thread.run(if_still, session, prefix, draft_after, later=True)
                if tree is None or session.prefix is not prefix:
                    return
                yield session.ahead(prefix, TEXT, Ahead(assumed=outcome, tree=tree))
        for group, found in asked.items():
            for each in await found:
                if session.prefix is not prefix:
                    return
                yield session.ahead(prefix, group, each)

    def features(self, message: FeatureChunk) -> None:
        session = self._sessions.get(message.session_id)
        if session is not None:
            self._keep(session, message.features)

    def close(self, message: CloseSession) -> None:
        session = self._drop(message.session_id)
        if session is None:
            return
        if session.text is not None:
            self._thread.run(logged, session.text.close)
        if self.shared is not None:
            self.shared.end(session)
        self._ended += 1
        if self._ended % _SAVE_EVERY == 0:
            self._thread.run(logged, self._text.save)

    async def forget(self, message: ForgetTenant) -> None:
        """As ``Drafter.forget``. The tenant's live sessions are dropped here, so their next step asks to reopen them.

        Raises:
            TimeoutError: a source or the store hangs, so that it is unknown whether it has forgotten.
            OutriderError: the store of shared answers cannot be reached.
        """
        shared = [] if self.shared is None else [self.shared.forget(message.tenant)]
        for session in [each for each in self._sessions.values() if each.tenant == message.tenant]:
            self._drop(session.id)
        forgetting = [group.forget(message.tenant) for group in self._models.values()]
        async with asyncio.timeout(_FORGET_S):
            await asyncio.gather(self._forget_text(message.tenant), *forgetting, *shared)

    async def start(self) -> None:
        """Load the models of ``TrainedConfig.at_start``, so that one which cannot be used is refused now.

        Without this, each is loaded when a request first names it.

        Raises:
            ConfigurationError: says which one, and why.
        """
        # One after the other: transformers changes settings of the whole process while it loads.
        for name in self._config.trained.at_start:
            await self._model(name).load()

    async def stop(self) -> None:
        """Save what was learnt about the sources, and let models end what they are at, unless one hangs.

        A process that ends while a thread of its own is inside torch is aborted.
        """
        if self.shared is not None:
            await self.shared.stop()
        ended = [group.ended() for group in self._models.values()]
        await self._thread.run(self._text.save)
        if ended:
            await asyncio.wait(ended, timeout=_STOP_S)

    async def _take_answers(self, tenant: str, answers: Sequence[Sequence[int]]) -> None:
        await self._thread.run(self._text.take_answers, tenant, answers)

    async def _forget_text(self, tenant: str) -> None:
        await self._thread.run(self._text.forget, tenant)

    def _model(self, name: str) -> ModelGroup:
        if name not in self._models:
            make = partial(make_source, name, self._config)
            self._models[name] = ModelGroup(name, cast(Callable[[], ModelSource], make))
        return self._models[name]

    def _keep(self, session: DraftedRequest, states: Features) -> None:
        if session.reads_states and states.rows and states.layers:
            self._states.add(session.states, states)

    def _drop(self, session_id: str) -> DraftedRequest | None:
        if (session := self._session(session_id)) is not None:
            del self._sessions[session_id]
            self._states.forget(session.states)
            for group in session.models:
                group.close(session_id)
        return session
