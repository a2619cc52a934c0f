"""Token recycling: what the target held likely after a token the last time it saw it (Luo et al., 2024, arXiv 2408.08696).

Every pass shows the likeliest ids after each verified node, rejected ones too. The table keeps them, the last word counts;
drafting follows it from the last token on, the likeliest paths first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from services.drafter.config import RecyclingConfig
from speculation.messages import OpenSession, StepReport
from speculation.tree import ROOT
from speculation.types import TokenTree

NAME = "recycling"

# How likely the table's first, second, ... successor is the next token: rough, and only used to rank nodes.
_BY_RANK = (0.45, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)

Successors = dict[int, tuple[int, ...]]


class Recycling:
    """Source: see the module. Requests of one tenant share a table; what one tenant's text has shown, no other sees."""

    def __init__(self, config: RecyclingConfig) -> None:
        self._config = config
        self._tables: OrderedDict[str, Successors] = OrderedDict()

    def open(self, message: OpenSession) -> RecyclingSession:
        """See ``Source``."""
        table = self._tables.setdefault(message.tenant, {})
        self._tables.move_to_end(message.tenant)
        if len(self._tables) > self._config.max_tenants:
            self._tables.popitem(last=False)
        return RecyclingSession(table, message.tokens)


class RecyclingSession:
    """One request's place in its tenant's table."""

    def __init__(self, table: Successors, tokens: Sequence[int]) -> None:
        self._table = table
        self._last = tokens[-1]
        # Before any pass has shown more, the prompt's own pairs are what is known.
        for token, follower in pairwise(tokens):
            if token not in table:
                table[token] = (follower,)

    def draft(self, max_nodes: int) -> TokenTree:
        """See ``SourceSession``."""
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        # (minus the path's probability, when it was found, parent, token)
        heap: list[tuple[float, int, int, int]] = []

        def unfold(node: int, token: int, probability: float) -> None:
            for rank, follower in enumerate(self._table.get(token, ())[: len(_BY_RANK)]):
                heapq.heappush(heap, (-probability * _BY_RANK[rank], len(tokens) * len(_BY_RANK) + rank, node, follower))

        unfold(ROOT, self._last, 1.0)
        while heap and len(tokens) < max_nodes:
            negative, _, parent, token = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            unfold(len(tokens) - 1, token, -negative)
        return TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=(NAME,) * len(tokens), scores=tuple(scores))

    def observe(self, report: StepReport) -> None:
        """See ``SourceSession``."""
        seen = report.observation
        if seen is not None and seen.top_ids:
            self._table[self._last] = seen.top_ids[0]
            for token, likely in zip(seen.tree.tokens, seen.top_ids[1:], strict=True):
                self._table[token] = likely
        else:
            for token, follower in pairwise((self._last, *report.committed)):
                known = self._table.get(token, ())
                self._table[token] = (follower, *(other for other in known if other != follower))[: len(_BY_RANK)]
        self._last = report.committed[-1]

    def close(self) -> None:
        """See ``SourceSession``: the table is the tenant's."""
