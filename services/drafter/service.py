"""The drafter: sessions of many requests, each with the sources that its plan names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from services.drafter.catalogue import check_names
from services.drafter.config import DrafterConfig
from services.drafter.outcomes import likeliest_outcomes
from services.drafter.sessions import Joined, Sources
from services.drafter.source import Retrieving
from speculation import limits
from speculation.errors import OutriderError
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    FeatureChunk,
    ForgetTenant,
    OpenSession,
    StepReport,
    log_name,
)
from speculation.ports import Retriever
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import EMPTY_TREE, TokenTree

log = logging.getLogger(__name__)

# What is learnt of sources is kept whenever so many requests have ended.
_SAVE_EVERY = 16


@dataclass(kw_only=True, slots=True)
class _Session:
    tenant: str | None
    sources: Joined
    length: int
    prefix_hash: int
    traceparent: str
    max_nodes: int = 0
    tree: TokenTree = EMPTY_TREE


class DrafterService:
    """Implements ``speculation.ports.Drafter``.

    Args:
        retriever: the way to the retrieval index, if there is one.
    """

    def __init__(self, config: DrafterConfig, retriever: Retriever | None = None) -> None:
        self._config = config
        self._retriever = retriever
        self._sources = Sources(config)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._ended = 0
        self.retrievals_missed = 0

    @property
    def sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        """See ``Drafter``."""
        try:
            check_names(message.sources)
            joined = self._sources.open(message)
        except OutriderError as error:
            return DraftFailure(session_id=message.session_id, reason=str(error))
        name = log_name(message.session_id, message.traceparent)
        log.info("session %s: %d tokens, %s", name, len(message.tokens), ", ".join(message.sources))
        # Opened anew: what it learnt before is in the tokens that came with the message.
        self._sessions.pop(message.session_id, None)
        self._sessions[message.session_id] = _Session(
            tenant=message.tenant,
            sources=joined,
            length=len(message.tokens),
            prefix_hash=extend_hash(EMPTY_HASH, message.tokens),
            traceparent=message.traceparent,
        )
        if len(self._sessions) > self._config.max_sessions:
            forgotten = next(iter(self._sessions))
            self.close(CloseSession(session_id=forgotten))
            log.warning("dropped session %s: more than max_sessions=%d", forgotten, self._config.max_sessions)
        return await self._draft(message.session_id, message.max_nodes)

    async def step(self, message: StepReport) -> Draft | DraftFailure:
        """See ``Drafter``."""
        session = self._sessions.get(message.session_id)
        if session is None:
            return DraftFailure(session_id=message.session_id, reason="unknown session", reopen=True)
        prefix_hash = extend_hash(session.prefix_hash, message.committed)
        if session.length + len(message.committed) != message.length or prefix_hash != message.prefix_hash:
            del self._sessions[message.session_id]
            return DraftFailure(session_id=message.session_id, reason="a step was missed", reopen=True)
        session.length, session.prefix_hash = message.length, prefix_hash
        session.sources.session.observe(message)
        self._sessions.move_to_end(message.session_id)
        return await self._draft(message.session_id, message.max_nodes)

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        """See ``Drafter``: drafts for the likeliest outcomes of the step that the last draft was for."""
        for draft in self.ahead(session_id):
            yield draft

    def ahead(self, session_id: str) -> Sequence[Draft]:
        """See ``further``."""
        session = self._sessions.get(session_id)
        if session is None or session.sources.blend is None or not self._config.draft_ahead:
            return ()
        blend = session.sources.blend
        outcomes = likeliest_outcomes(session.tree, blend.likeliest_after, self._config.draft_ahead)
        return [
            self._message(session_id, session, blend.draft_after(outcome, session.max_nodes), outcome)
            for outcome in outcomes
            if len(outcome) <= limits.MAX_ASSUMED
        ]

    def features(self, message: FeatureChunk) -> None:
        """See ``Drafter``."""

    def close(self, message: CloseSession) -> None:
        """See ``Drafter``."""
        session = self._sessions.pop(message.session_id, None)
        if session is not None:
            session.sources.session.close()
            self._ended += 1
            if self._ended % _SAVE_EVERY == 0:
                self._sources.save()

    async def forget(self, message: ForgetTenant) -> None:
        """See ``Drafter``."""
        # First, since what closes may leave something behind. Requests under way are opened anew, in another name.
        for session_id in [name for name, session in self._sessions.items() if session.tenant == message.tenant]:
            self.close(CloseSession(session_id=session_id))
        self._sources.forget(message.tenant)

    def stop(self) -> None:
        """Keep what was learnt of the sources."""
        self._sources.save()

    async def _draft(self, session_id: str, max_nodes: int) -> Draft:
        start = time.perf_counter()
        session = self._sessions[session_id]
        # Together, so that they share a message.
        await asyncio.gather(*(self._retrieve(session_id, wanting) for wanting in session.sources.retrieving))
        session.max_nodes = max_nodes
        session.tree = session.sources.session.draft(max_nodes)
        return self._message(session_id, session, session.tree, (), time.perf_counter() - start)

    async def _retrieve(self, session_id: str, wanting: Retrieving) -> None:
        """Give a source what the index finds, or nothing: a draft without is better than a late one."""
        query = wanting.query()
        if self._retriever is None or query is None:
            return
        query = replace(query, session_id=session_id, traceparent=self._sessions[session_id].traceparent)
        try:
            async with asyncio.timeout(self._config.retrieval_deadline_s):
                found = await self._retriever.retrieve(query)
        except (TimeoutError, OutriderError) as error:
            log.debug("no retrieval: %s", error)
        except Exception:
            log.exception("retrieval failed")
        else:
            wanting.found(found.continuations)
            return
        self.retrievals_missed += 1
        wanting.found(())

    def _message(
        self, session_id: str, session: _Session, tree: TokenTree, assumed: tuple[int, ...], seconds: float = 0.0
    ) -> Draft:
        return Draft(
            session_id=session_id,
            base_length=session.length,
            base_hash=session.prefix_hash,
            assumed=assumed,
            tree=tree,
            drafting_s=seconds,
        )
