"""How drafts for likely outcomes of a step grow, from the candidates that the step's own draft left over.

An outcome is a node that the draft does not hold, below one that it holds or at its root: the draft's path is accepted, and
then that token is the bonus token. (Speculative speculative decoding, 2603.03251.)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.drafter.heads.beam import NO_NODES, Growing, Indices, Numbers, TreeGrowth
from services.drafter.sources.interfaces import Ahead, AheadWanted
from speculation.tree import ROOT
from speculation.types import TokenTree

# Nodes of the draft without candidates behind them that are run first, the likeliest.
_LEAVES = 16


class OutcomeTrees(Growing):
    """Implements ``Growth`` over the pool of a draft that is done: for each outcome the likeliest paths, as ``BestFirst``.

    Args:
        done: the draft's growth.
        most: most outcomes.
        max_nodes: most nodes of each draft.
        steps: most rounds behind the outcomes' own; one more behind outcomes that were run before.
        width: most nodes of a round for one outcome, and most children of a node.
        least: nodes less likely than this are not drafted.
    """

    def __init__(
        self,
        done: TreeGrowth,
        *,
        most: int,
        max_nodes: int,
        steps: int,
        width: int,
        least: float = 0.0,
    ) -> None:
        super().__init__()
        self.pool, draft = done.pool, done.draft()
        self.children = width
        self._most = most
        self._max_nodes = max_nodes
        self._left = 1 + steps
        self._width = width
        self._least = np.log(least) if least > 0 else -np.inf
        self._draft = {ROOT, *draft.tolist()}
        # Whose children are in the pool.
        self._run_before = set(self.pool.parents.tolist()) - {ROOT}
        leaves = [node for node in self._by_score(draft) if node not in self._run_before][:_LEAVES]
        self._run = np.array(leaves, dtype=np.int64)
        self._begun = not leaves
        # Candidates behind each outcome; and of each of these, and of the outcome itself, which outcome it is.
        self._below: dict[int, list[int]] = {}
        self._owner: dict[int, int] = {}
        self.rows = len(leaves) + most * (1 + steps) * width

    @classmethod
    def behind(cls, done: TreeGrowth, wanted: AheadWanted, *, steps: int, width: int) -> OutcomeTrees:
        """Those that are asked for."""
        return cls(
            done, most=wanted.most, max_nodes=wanted.max_nodes, steps=steps, width=width, least=wanted.min_probability
        )

    def add(self, tokens: Indices, logs: Numbers) -> None:
        first = len(self.pool)
        self.pool.extend(self._run, tokens[:, : self.children], logs[:, : self.children])
        self._enter(range(first, len(self.pool)))

    def grow(self) -> Indices:
        if not self._begun:
            self._begun = True
            return self._run
        if not self._below:
            self._choose()
        self._run = NO_NODES
        if self._left:
            self._left -= 1
            self._run = np.array([node for outcome in self._below for node in self._open(outcome)], dtype=np.int64)
        self._run_before.update(self._run.tolist())
        return self._run

    def found(self, source: str) -> list[Ahead]:
        """The drafts as far as they have grown, the likeliest outcome's first."""
        return [
            Ahead(assumed=self._path(outcome), tree=tree)
            for outcome in self._below
            if (tree := self._tree_behind(outcome, source))
        ]

    def _by_score(self, nodes: Indices) -> list[int]:
        found: list[int] = nodes[np.argsort(-self.pool.scores[nodes], kind="stable")].tolist()
        return found

    def _choose(self) -> None:
        """Choose the outcomes. A draft may have been grown behind one before it turned out to be none of its nodes."""
        pool = self.pool
        parents = pool.parents.tolist()
        left = [
            node
            for node, (parent, score) in enumerate(zip(parents, pool.scores.tolist(), strict=True))
            if parent in self._draft and node not in self._draft and score > -np.inf
        ]
        chosen = self._by_score(np.array(left, dtype=np.int64))[: self._most]
        self._below = {outcome: [] for outcome in chosen}
        self._owner = {outcome: outcome for outcome in chosen}
        self._enter(range(len(pool)))

    def _enter(self, nodes: Iterable[int]) -> None:
        """Note of nodes, parents before their children, whose draft they are in."""
        for node in nodes:
            if (outcome := self._owner.get(int(self.pool.parents[node]))) is not None:
                self._owner[node] = outcome
                self._below[outcome].append(node)

    def _best(self, outcome: int) -> list[int]:
        """The nodes of an outcome's draft, likeliest first."""
        scores, least = self.pool.scores, self.pool.scores[outcome] + self._least
        best = self._by_score(np.array(self._below[outcome], dtype=np.int64))[: self._max_nodes]
        return [node for node in best if scores[node] > -np.inf and scores[node] >= least]

    def _open(self, outcome: int) -> list[int]:
        if outcome not in self._run_before:
            return [outcome]
        best = self._best(outcome)
        # No child is likelier than its parent, so none of the last one's would come among the best.
        open_ones = best[:-1] if len(best) == self._max_nodes else best
        return [node for node in open_ones if node not in self._run_before][: self._width]

    def _path(self, node: int) -> tuple[int, ...]:
        path: list[int] = []
        while node != ROOT:
            path.append(int(self.pool.tokens[node]))
            node = int(self.pool.parents[node])
        return tuple(reversed(path))

    def _tree_behind(self, outcome: int, source: str) -> TokenTree:
        pool, nodes = self.pool, sorted(self._best(outcome))
        place = {outcome: ROOT} | {node: index for index, node in enumerate(nodes)}
        return TokenTree(
            tokens=tuple(pool.tokens[nodes].tolist()) if nodes else (),
            parents=tuple(place[parent] for parent in pool.parents[nodes].tolist()) if nodes else (),
            sources=(source,) * len(nodes),
            scores=tuple(np.minimum(1.0, np.exp(pool.scores[nodes] - pool.scores[outcome])).tolist()) if nodes else (),
        )
