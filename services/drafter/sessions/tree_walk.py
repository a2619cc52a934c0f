"""Walks a source's trees node by node, so that a model or a text source that proposes trees can take part in the blend."""

from __future__ import annotations

import math
from collections.abc import Iterator

from typing_extensions import override

from services.drafter.sources.interfaces import TreeSession
from speculation.messages import StepReport
from speculation.tree import ROOT, children
from speculation.types import EMPTY_TREE, TokenTree

# Kinds of candidates: by depth in the tree, and by the probability that the source claims for them after their parent, in
# halves of bits. The calibrator learns what a claim is worth, not a rank: a source that is sure is mostly right.
_DEPTHS = (1, 2, 4)
_BUCKETS = 12
_PER_BIT = 2
# What a source claims that gives no scores, by rank among its candidates.
_BY_RANK = (0.5, 0.15, 0.08, 0.05)


def prior_of(name: str) -> dict[str, float]:
    """The prior probabilities of such a source's kinds: what it claims, a little less further down."""
    return {
        _kind(name, depth, bucket): 0.9 ** (1 + level) * 2 ** (-(bucket + 0.5) / _PER_BIT)
        for level, depth in enumerate(_DEPTHS)
        for bucket in range(_BUCKETS)
    }


def _kind(name: str, depth: int, bucket: int) -> str:
    return f"{name}:{depth}:{bucket}"


class TreeWalk:
    """Implements ``PathSession``. A place is a node of the tree and its depth; there is none before the tree has arrived."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tree: TokenTree | None = None
        # Of each node: its children by token, in their order.
        self._below: dict[int, dict[int, int]] = {}

    def take(self, tree: TokenTree) -> None:
        """Use a tree for the present prefix, until the next step."""
        self._tree = tree
        self._below = {parent: {tree.tokens[n]: n for n in nodes} for parent, nodes in children(tree).items()}

    def start(self) -> tuple[int, int] | None:
        return None if self._tree is None else (ROOT, 0)

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int] | None:
        node = self._below.get(place[0], {}).get(token)
        return None if node is None else (node, place[1] + 1)

    def candidates(self, place: tuple[int, int]) -> Iterator[tuple[int, str]]:
        at, above = place
        depth = max(limit for limit in _DEPTHS if limit <= above + 1)
        for rank, (token, node) in enumerate(self._below.get(at, {}).items()):
            share = self._claimed(at, node, rank)
            bits = -math.log2(share) if share > 0 else math.inf
            yield token, _kind(self._name, depth, int(min(max(0.0, bits * _PER_BIT), _BUCKETS - 1)))

    def observe(self, report: StepReport) -> None:
        self._tree = None
        self._below = {}

    def catch_up(self) -> bool:
        """No work is deferred."""
        return False

    def close(self) -> None:
        """The source's own session is closed by its owner."""

    def _claimed(self, parent: int, node: int, rank: int) -> float:
        """The probability that the source claims for a node after its parent."""
        scores = EMPTY_TREE.scores if self._tree is None else self._tree.scores
        if not scores:
            return _BY_RANK[min(rank, len(_BY_RANK) - 1)]
        whole = 1.0 if parent == ROOT else scores[parent]
        return scores[node] / whole if whole > 0 else 0.0


class ProposedTreeWalk(TreeWalk):
    """Over the tree that a text source proposes, which is asked for it when the blend first needs it.

    Args:
        max_nodes: most nodes that the source proposes.
    """

    def __init__(self, name: str, session: TreeSession, max_nodes: int) -> None:
        super().__init__(name)
        self._session = session
        self._max_nodes = max_nodes

    @override
    def start(self) -> tuple[int, int] | None:
        if self._tree is None:
            self.take(self._session.draft(self._max_nodes))
        return super().start()

    @override
    def observe(self, report: StepReport) -> None:
        super().observe(report)
        self._session.observe(report)

    @override
    def close(self) -> None:
        self._session.close()
