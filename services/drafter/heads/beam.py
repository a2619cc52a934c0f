"""How a tree of drafts grows, level by level: which nodes the model runs next, and which end up in the draft.

A growth holds a pool of candidates. Each round it names the nodes to run, and is given the likeliest tokens after each of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from services.drafter.sessions.drawn_proposals import Draw, drawn_from
from speculation import limits
from speculation.tree import ROOT
from speculation.types import Proposal, TokenTree

Indices = NDArray[np.int64]
Numbers = NDArray[np.float64]

NO_NODES: Indices = np.empty(0, dtype=np.int64)


class Growth(Protocol):
    """What grows.

    Attributes:
        children: how many of the likeliest tokens it wants after each node.
        rows: most nodes that are run in all.
    """

    children: int
    rows: int

    def add(self, tokens: Indices, logs: Numbers) -> None:
        """Take what follows the nodes of the last ``grow``; the first time, what follows the committed text.

        Args:
            tokens: [nodes, children], likeliest first.
            logs: their log-probabilities; -inf: cannot come.
        """
        ...

    def grow(self) -> Indices:
        """The nodes to run next, [nodes], parents before their descendants; none if the tree is done."""
        ...

    def tokens(self, nodes: Indices) -> Indices:
        """Tokens of nodes."""
        ...

    def parents(self, nodes: Indices) -> Indices:
        """Parents of nodes; ``ROOT``: they follow the committed text."""
        ...

    def depths(self, nodes: Indices) -> Indices:
        """Depths of nodes; children of the root have depth 1, the root 0."""
        ...


class TreeGrowth(Growth, Protocol):
    """A draft that grows."""

    pool: CandidatePool

    def draft(self) -> Indices:
        """The nodes of the draft."""
        ...

    def tree(self, source: str) -> TokenTree:
        """The draft."""
        ...


def grow_by_levels(growth: Growth, tokens: Indices, logs: Numbers) -> None:
    """Grow a tree of which each level says the same behind all its nodes.

    Args:
        tokens: [levels + 1, children], likeliest first.
        logs: their log-probabilities; -inf behind the last level.
    """
    growth.add(tokens[:1], logs[:1])
    grow_on_by_levels(growth, tokens, logs)


def grow_on_by_levels(growth: Growth, tokens: Indices, logs: Numbers) -> None:
    """Grow on a tree that has begun, by the same levels."""
    while len(nodes := growth.grow()):
        behind = growth.depths(nodes)
        growth.add(tokens[behind], logs[behind])


class CandidatePool:
    """Candidates: token, parent, depth, and the log-probability of the path. Children come behind their parents."""

    def __init__(self) -> None:
        self.tokens = self.parents = self.depths = NO_NODES
        self.scores: Numbers = np.empty(0)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, parents: Indices, tokens: Indices, logs: Numbers) -> None:
        """Add children [parents, children] of each of ``parents``."""
        children = tokens.shape[1]
        at_root = parents == ROOT
        above = np.where(at_root, 0.0, self.scores[parents] if len(self) else 0.0)
        depths = np.where(at_root, 0, self.depths[parents] if len(self) else 0) + 1
        self.tokens = np.concatenate((self.tokens, tokens.ravel()))
        self.parents = np.concatenate((self.parents, np.repeat(parents, children)))
        self.depths = np.concatenate((self.depths, np.repeat(depths, children)))
        self.scores = np.concatenate((self.scores, (logs + above[:, None]).ravel()))

    def best(self, count: int, least: float = -np.inf) -> Indices:
        """The likeliest ``count`` nodes, likeliest first; of equals, the earliest. None is less likely than ``least``."""
        order = np.argsort(-self.scores, kind="stable")[:count]
        scores = self.scores[order]
        kept: Indices = order[(scores > -np.inf) & (scores >= least)]
        return kept

    def tree(self, nodes: Indices, source: str, proposals: Sequence[Proposal] = ()) -> TokenTree:
        """The sub-tree of ``nodes``, of which none is without its parent, by index."""
        nodes = np.sort(nodes)
        place = np.full(len(self) + 1, ROOT)
        place[nodes] = np.arange(len(nodes))
        return TokenTree(
            tokens=tuple(self.tokens[nodes].tolist()),
            # The parent of the root's children is -1: the last entry.
            parents=tuple(place[self.parents[nodes]].tolist()),
            sources=(source,) * len(nodes),
            scores=tuple(np.minimum(1.0, np.exp(self.scores[nodes])).tolist()),
            proposals=tuple(proposals),
        )


class Growing:
    """What all growths share.

    Attributes:
        pool: candidates so far.
    """

    def __init__(self) -> None:
        self.pool = CandidatePool()
        self._run: Indices = np.array([ROOT])

    def tokens(self, nodes: Indices) -> Indices:
        return self.pool.tokens[nodes]

    def parents(self, nodes: Indices) -> Indices:
        return self.pool.parents[nodes]

    def depths(self, nodes: Indices) -> Indices:
        return np.where(nodes == ROOT, 0, self.pool.depths[nodes]) if len(self.pool) else np.zeros_like(nodes)


class GrowingTree(Growing):
    """What growths of one tree share."""

    def draft(self) -> Indices:
        """As ``TreeGrowth.draft``."""
        raise NotImplementedError

    def tree(self, source: str) -> TokenTree:
        """As ``TreeGrowth.tree``."""
        return self.pool.tree(self.draft(), source)


class BestFirst(GrowingTree):
    """The ``max_nodes`` likeliest paths, as far as the model is run. Implements ``TreeGrowth``.

    Each round runs the likeliest nodes that have not been run, at whatever depth: as long as a child of theirs can still
    come among the likeliest ``max_nodes``. So no round is spent on what cannot pay. (EAGLE-2 widens the last level only.)

    Args:
        steps: most rounds; a path has at most one node more.
        width: most nodes of a round, and most children of a node.
        least: nodes less likely than this are not drafted.
    """

    def __init__(self, max_nodes: int, *, steps: int, width: int, least: float = 0.0) -> None:
        super().__init__()
        self.children = min(width, max_nodes)
        self.rows = steps * width
        self._max_nodes = max_nodes
        self._steps = steps
        self._width = width
        self._least = np.log(least) if least > 0 else -np.inf
        self._done: set[int] = set()

    def add(self, tokens: Indices, logs: Numbers) -> None:
        self.pool.extend(self._run, tokens[:, : self.children], logs[:, : self.children])

    def grow(self) -> Indices:
        self._run = NO_NODES
        if self._steps == 0:
            return self._run
        self._steps -= 1
        best = self.pool.best(self._max_nodes, self._least)
        # No child is likelier than its parent, so none of the last one's would come among the best.
        open_ones = best[:-1] if len(best) == self._max_nodes else best
        chosen = [node for node in open_ones.tolist() if node not in self._done][: self._width]
        self._done.update(chosen)
        self._run = np.array(chosen, dtype=np.int64)
        return self._run

    @override
    def draft(self) -> Indices:
        return self.pool.best(self._max_nodes, self._least)


class DynamicTree(GrowingTree):
    """EAGLE-2's dynamic tree, exactly as its authors' ``topK_genrate``. Implements ``TreeGrowth``.

    Every level runs the best ``top_k`` of the level before, and the draft is the best ``total`` - 1 of all candidates (their
    ``total_token`` counts the last committed token, too).

    Args:
        depth: levels that are run; a path has at most one node more.
    """

    def __init__(self, *, total: int, depth: int, top_k: int) -> None:
        super().__init__()
        self.children = top_k
        self.rows = depth * top_k
        self._nodes = total - 1
        self._levels = depth
        self._beams: Indices = NO_NODES

    def add(self, tokens: Indices, logs: Numbers) -> None:
        first = len(self.pool)
        self.pool.extend(self._run, tokens[:, : self.children], logs[:, : self.children])
        level = self.pool.scores[first:]
        order = np.argsort(-level, kind="stable")[: self.children]
        self._beams = first + order[level[order] > -np.inf]

    def grow(self) -> Indices:
        self._run = self._beams if self._levels else NO_NODES
        self._levels -= 1
        return self._run

    @override
    def draft(self) -> Indices:
        return self.pool.best(self._nodes)


class SampledChain(GrowingTree):
    """A chain drawn from the draft distribution q, as speculation/rejection.py needs it. Implements ``TreeGrowth``.

    q is what the model gives, cut to the ``limits.MAX_PROPOSAL`` likeliest tokens: tokens are drawn from the very
    distribution that is sent along. How long the chain is depends on nothing that was drawn: a verifier drops chains for
    which it has no room, and if it dropped some tokens rather than others, answers would be biased.

    Args:
        steps: most rounds; the chain has at most one token more.
        draw: the drafter's own randomness, which nothing that the target chooses depends on.
    """

    def __init__(self, max_nodes: int, *, steps: int, draw: Draw) -> None:
        super().__init__()
        self.children = limits.MAX_PROPOSAL
        self.rows = steps
        self._length = min(max_nodes, steps + 1)
        self._draw = draw
        self._proposals: list[Proposal] = []

    def add(self, tokens: Indices, logs: Numbers) -> None:
        drawn, proposal = drawn_from(tokens[0], np.exp(logs[0]), self._draw)
        token, probability = proposal.token_ids[drawn], proposal.probabilities[drawn]
        self.pool.extend(self._run, np.array([[token]]), np.log([[probability]]))
        self._proposals.append(proposal)

    def grow(self) -> Indices:
        self._run = NO_NODES if len(self.pool) == self._length else np.array([len(self.pool) - 1])
        return self._run

    @override
    def draft(self) -> Indices:
        return np.arange(len(self.pool))

    @override
    def tree(self, source: str) -> TokenTree:
        return self.pool.tree(self.draft(), source, self._proposals)
