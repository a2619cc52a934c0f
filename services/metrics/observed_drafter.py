"""A drafter and a retrieval service whose answers are counted and timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from services.metrics.registry import Metrics
from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    FeatureChunk,
    ForgetTenant,
    OpenSession,
    RetrievalQuery,
    Retrieved,
    StepReport,
)
from speculation.ports import Drafter, DraftsAtOnce, DraftsTogether


class ObservedDrafter:
    """Implements ``speculation.ports.Drafter`` in front of another drafter."""

    def __init__(self, drafter: Drafter, metrics: Metrics) -> None:
        self._drafter = drafter
        self._at_once = drafter if isinstance(drafter, DraftsAtOnce) else None
        self._together = drafter if isinstance(drafter, DraftsTogether) else None
        self._drafts = metrics.counter("drafter_drafts_total")
        self._failures = metrics.counter("drafter_failures_total")
        self._nodes = metrics.counter("drafter_nodes_total")
        self._seconds = metrics.histogram("drafter_draft_seconds")

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        return self._seen(await self._drafter.open(message))

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        return self._seen(await self._drafter.step(message))

    def at_once(self, message: StepReport) -> Draft | DraftFailure | None:
        """As ``speculation.ports.DraftsAtOnce.at_once``."""
        return None if self._at_once is None else self._seen(self._at_once.at_once(message))

    def together(self, reports: ReportColumns) -> DraftColumns | None:
        """As ``speculation.ports.DraftsTogether.together``."""
        drafts = None if self._together is None else self._together.together(reports)
        if drafts is None:
            return None
        if found := sum([nodes > 0 for nodes in drafts.node_counts]):
            self._drafts.add(found, drafts.group)
            for _ in range(found):
                self._seconds.observe(drafts.drafting_s, drafts.group)
            for number, nodes in Counter(drafts.sources).items():
                self._nodes.add(nodes, drafts.source_names[number])
        return drafts

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        async for draft in self._drafter.further(session_id):
            self._seen(draft)
            yield draft

    def _seen(self, reply: Draft | DraftFailure | None) -> Draft | DraftFailure | None:
        if isinstance(reply, DraftFailure):
            self._failures.add(1)
        # Where no draft was asked for, or none found, the tree is empty.
        elif reply is not None and len(reply.tree):
            self._drafts.add(1, reply.group)
            # Drafts made ahead say no time.
            if not reply.assumed:
                self._seconds.observe(reply.drafting_s, reply.group)
            for source, nodes in Counter(reply.tree.sources).items():
                self._nodes.add(nodes, source)
        return reply

    def features(self, message: FeatureChunk) -> None:
        self._drafter.features(message)

    def close(self, message: CloseSession) -> None:
        self._drafter.close(message)

    async def forget(self, message: ForgetTenant) -> None:
        await self._drafter.forget(message)


class LooksUpIndex(Protocol):
    """A retrieval service: answers queries from one version of an index, and follows its versions."""

    switches: int

    @property
    def version(self) -> str | None:
        """Of the index in use."""
        ...

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """The answers, in the order of the queries."""
        ...


class ObservedRetrieval:
    """Implements ``speculation.ports.Retriever``, and ``look_up``, in front of a retrieval service."""

    def __init__(self, service: LooksUpIndex, metrics: Metrics) -> None:
        self._service = service
        self._answered = metrics.counter("retrieval_lookups_total")
        self._failures = metrics.counter("retrieval_failures_total")
        self._seconds = metrics.histogram("retrieval_lookup_seconds")
        metrics.follow("index_info", lambda: {(version,): 1.0} if (version := service.version) else {})
        metrics.follow("index_switches_total", lambda: {(): service.switches})

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        return self.look_up([query])[0]

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """As that of the service."""
        start = time.perf_counter()
        try:
            answers = self._service.look_up(queries)
        except Exception:
            self._failures.add(1)
            raise
        self._seconds.observe(time.perf_counter() - start)
        hits = sum(bool(answer.continuations) for answer in answers)
        self._answered.add(hits, "hit")
        self._answered.add(len(answers) - hits, "miss")
        return answers
