"""Walks the trees of a source node by node, so that the source can take part in the blend."""

from __future__ import annotations

from collections.abc import Iterator

from services.drafter.interfaces import TreeSession
from speculation.messages import StepReport
from speculation.tree import ROOT, children
from speculation.types import TokenTree

# Kinds of candidates: by rank among the source's candidates at the node, and by depth in the source's tree.
_RANKS = 4
_DEPTHS = (1, 2, 4)
_BY_RANK = (0.4, 0.15, 0.08, 0.05)


def prior_of(name: str) -> dict[str, float]:
    """The prior probabilities of such a source's kinds."""
    return {_kind(name, rank, depth): _BY_RANK[rank] for rank in range(_RANKS) for depth in _DEPTHS}


def _kind(name: str, rank: int, depth: int) -> str:
    deepest = max(limit for limit in _DEPTHS if limit <= depth)
    return f"{name}:{deepest}:{min(rank, _RANKS - 1)}"


class TreeWalk:
    """Implements ``PathSession``. A place is a node of the tree that the source proposes, and its depth."""

    def __init__(self, name: str, session: TreeSession, max_nodes: int) -> None:
        self._name = name
        self._session = session
        self._max_nodes = max_nodes
        self._tree: TokenTree | None = None
        self._below: dict[int, dict[int, int]] = {}

    def start(self) -> tuple[int, int]:
        if self._tree is None:
            tree = self._tree = self._session.draft(self._max_nodes)
            self._below = {parent: {tree.tokens[n]: n for n in nodes} for parent, nodes in children(tree).items()}
        return ROOT, 0

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int] | None:
        node = self._below.get(place[0], {}).get(token)
        return None if node is None else (node, place[1] + 1)

    def candidates(self, place: tuple[int, int]) -> Iterator[tuple[int, str]]:
        for rank, token in enumerate(self._below.get(place[0], ())):
            yield token, _kind(self._name, rank, place[1] + 1)

    def observe(self, report: StepReport) -> None:
        self._tree = None
        self._session.observe(report)

    def catch_up(self) -> bool:
        """No work is deferred."""
        return False

    def close(self) -> None:
        self._session.close()
