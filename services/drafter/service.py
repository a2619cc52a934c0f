"""The drafter: sessions of many requests, each with the sources that its plan names."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from services.drafter.catalogue import SOURCES, check_names
from services.drafter.config import DrafterConfig
from services.drafter.source import Source, SourceSession
from speculation.errors import InvalidArgument
from speculation.messages import CloseSession, Draft, DraftFailure, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import merge, prune

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Session:
    sources: list[SourceSession]
    length: int
    prefix_hash: int


class DrafterService:
    """Implements ``speculation.ports.Drafter``."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._sources: dict[str, Source] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    @property
    def sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        """See ``Drafter``."""
        try:
            check_names(message.sources)
        except InvalidArgument as error:
            return DraftFailure(session_id=message.session_id, reason=str(error))
        sources = [self._source(name).open(message) for name in message.sources]
        self._sessions[message.session_id] = _Session(
            sources=sources, length=len(message.tokens), prefix_hash=extend_hash(EMPTY_HASH, message.tokens)
        )
        if len(self._sessions) > self._config.max_sessions:
            forgotten, _ = self._sessions.popitem(last=False)
            log.warning("dropped session %s: more than max_sessions=%d", forgotten, self._config.max_sessions)
        return self._draft(message.session_id, message.max_nodes)

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
        for source in session.sources:
            source.observe(message)
        self._sessions.move_to_end(message.session_id)
        return self._draft(message.session_id, message.max_nodes)

    def close(self, message: CloseSession) -> None:
        """See ``Drafter``."""
        session = self._sessions.pop(message.session_id, None)
        for source in session.sources if session else ():
            source.close()

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            self._sources[name] = SOURCES[name](self._config)
        return self._sources[name]

    def _draft(self, session_id: str, max_nodes: int) -> Draft:
        start = time.perf_counter()
        session = self._sessions[session_id]
        trees = [source.draft(max_nodes) for source in session.sources]
        tree = trees[0] if len(trees) == 1 else prune(merge(trees), max_nodes, max_nodes)
        return Draft(
            session_id=session_id,
            base_length=session.length,
            base_hash=session.prefix_hash,
            tree=tree,
            drafting_s=time.perf_counter() - start,
        )
