"""A draft of masks: one pass guesses all levels of a tree, each without knowing the ones before it (PARD)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.draft_model.chain import DraftLimits
from services.drafter.draft_model.session import LmSession, MadeDraft
from services.drafter.draft_model.text_cache import NewRows
from services.drafter.heads.beam import BestFirst, SampledChain, TreeGrowth, grow_by_levels
from services.drafter.sessions.drawn_proposals import Draw
from speculation.tree import path_to

# Most children of a node, where nobody says.
_WIDTH = 10


class ParallelDraft:
    """Takes the logits of one pass, where ``DraftedChain`` takes those of one after the other.

    Args:
        source: name of the source.
    """

    def __init__(self, session: LmSession, limits: DraftLimits, source: str, draw: Draw) -> None:
        self._session = session
        self._limits = limits
        self._source = source
        self._draw = draw
        self._growth: TreeGrowth | None = None

    def take(self, logits: torch.Tensor) -> NewRows | None:
        """Take [levels, kept ids] logits, of the text's last row and of the masks behind it; there is no further pass."""
        limits, position = self._limits, len(self._session.tokens)
        if self._session.sampled:
            growth: TreeGrowth = SampledChain(limits.nodes, steps=len(logits) - 1, draw=self._draw)
            own = self._session.distribution
            found = [own.spread(row, own.temperature) for row in logits.numpy()]
        else:
            growth = BestFirst(limits.nodes, steps=limits.nodes, width=limits.branches or _WIDTH, least=limits.least)
            likely = (self._session.distribution.likeliest(row, position + at) for at, row in enumerate(logits.numpy()))
            found = [(each.ids, each.probabilities) for each in likely]
        tokens, logs = _levels(found, growth.children)
        grow_by_levels(growth, tokens, logs)
        self._growth = growth
        return None

    def made(self) -> MadeDraft:
        """The draft, and its likeliest path."""
        assert self._growth is not None
        tree = self._growth.tree(self._source)
        deepest = max(range(len(tree)), key=lambda node: (len(path_to(tree, node)), tree.scores[node]), default=None)
        chain = [] if deepest is None else [tree.tokens[node] for node in path_to(tree, deepest)]
        return MadeDraft(tree=tree, chain=chain)


def _levels(
    found: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """[levels + 1, count] tokens and log-probabilities, of each level the likeliest; -inf where there are fewer, and behind
    the last one."""
    tokens, logs = np.zeros((len(found) + 1, count), dtype=np.int64), np.full((len(found) + 1, count), -np.inf)
    for level, (ids, probabilities) in enumerate(found):
        few = min(count, len(ids))
        tokens[level, :few] = ids[:few]
        logs[level, :few] = np.log(probabilities[:few])
    return tokens, logs
