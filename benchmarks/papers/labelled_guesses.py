"""Counts which of SPECTRA's guesses are accepted, by where they come from (figure 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

from services.drafter.service import DrafterService
from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.tree import ROOT
from speculation.types import TokenTree


class LabelledGuesses:
    """Implements ``speculation.ports.Drafter`` by a drafter whose nodes name where they come from.

    A verifier takes nodes of the plan's sources alone, so it gets the trees with ``source`` at every node.

    Args:
        drafter: drafts with ``SpectraConfig.label_guesses``.
        source: the source that its one plan names.

    Attributes:
        drafted, accepted: nodes by label; those of the window, which nobody can accept, are left out.
    """

    def __init__(self, drafter: DrafterService, source: str) -> None:
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self._drafter = drafter
        self._source = source
        # Of each session's last draft.
        self._trees: dict[str, TokenTree] = {}

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        return self._told(await self._drafter.open(message))

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        self._count(message)
        return self._told(await self._drafter.step(message))

    def further(self, session_id: str) -> AsyncIterator[Draft]:
        return self._drafter.further(session_id)

    def features(self, message: FeatureChunk) -> None:
        self._drafter.features(message)

    def close(self, message: CloseSession) -> None:
        self._trees.pop(message.session_id, None)
        self._drafter.close(message)

    async def forget(self, message: ForgetTenant) -> None:
        await self._drafter.forget(message)

    async def stop(self) -> None:
        """As ``DrafterService.stop``."""
        await self._drafter.stop()

    def _told(self, reply: Draft | DraftFailure | None) -> Draft | DraftFailure | None:
        if not isinstance(reply, Draft):
            return reply
        self._trees[reply.session_id] = reply.tree
        return replace(reply, tree=replace(reply.tree, sources=(self._source,) * len(reply.tree)))

    def _count(self, message: StepReport) -> None:
        """Count the last draft, of which the step took as many tokens as its accepted path has."""
        tree = self._trees.pop(message.session_id, None)
        if tree is None or message.observation is None or not len(message.observation.tree):
            return
        probes = set(tree.probes)
        self.drafted.update(label for node, label in enumerate(tree.sources) if node not in probes)
        nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        node = ROOT
        for token in message.committed[: len(message.accepted_path)]:
            node = nodes[node, token]
            self.accepted[tree.sources[node]] += 1
