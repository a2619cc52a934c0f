"""One session's draft under way in a drafter of hidden states: which rows its nodes are, and what they feed back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.heads.beam import Growth, TreeGrowth
from services.drafter.heads.cache import PassRows
from services.drafter.heads.draft_choice import AskedRows
from services.drafter.heads.outcome_trees import OutcomeTrees
from services.drafter.heads.session import CommittedRows, FeatureSession
from speculation.tree import ROOT


class GrowingDraft:
    """One session's draft under way.

    Args:
        place: its place in the batch.
        rows: the rows of committed positions that it needs.
    """

    def __init__(self, place: int, session: FeatureSession, growth: TreeGrowth, rows: CommittedRows) -> None:
        self.place = place
        self.session = session
        self.draft = growth
        self.growth: Growth = growth
        self.rows = rows
        # By node that has been run: which row of the tree it is, and which of all rows that the head feeds back.
        self._row: dict[int, int] = {}
        self._fed: dict[int, int] = {}
        self._ancestors = np.zeros((growth.rows, growth.rows), dtype=np.bool_)

    def go_on(self, growth: OutcomeTrees) -> None:
        """Grow on behind the draft that is done."""
        self.growth = growth
        held, whole = len(self._row), len(self._row) + growth.rows
        ancestors = np.zeros((whole, whole), dtype=np.bool_)
        ancestors[:held, :held] = self._ancestors[:held, :held]
        self._ancestors = ancestors

    @property
    def run(self) -> Collection[int]:
        """Nodes that have been run."""
        return self._row.keys()

    def take_fed(self, fed: torch.Tensor) -> torch.Tensor:
        """[own rows, h], what its nodes fed back, of [rows, h] of all; they are numbered anew."""
        own = fed[list(self._fed.values())]
        self._fed = {node: row for row, node in enumerate(self._fed)}
        return own

    def move_fed(self, first: int) -> None:
        """Note that the rows that its nodes fed back begin at ``first`` now."""
        self._fed = {node: first + row for node, row in self._fed.items()}

    def part(self, nodes: NDArray[np.int64]) -> PassRows:
        """The part of a pass that runs ``nodes``."""
        return self.session.cache.tree(self.enter(nodes))

    def enter(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Note ``nodes`` as the next rows; [nodes, all rows], which of these each one sees, itself included."""
        first, end = len(self._row), len(self._row) + len(nodes)
        for row, (node, parent) in enumerate(zip(nodes.tolist(), self.growth.parents(nodes).tolist(), strict=True), first):
            if parent != ROOT:
                self._ancestors[row] = self._ancestors[self._row[parent]]
            self._ancestors[row, row] = True
            self._row[node] = row
        return self._ancestors[first:end, :end]

    def read(self, nodes: NDArray[np.int64]) -> list[int]:
        """Which rows fed back the passes over ``nodes`` read: those of their parents."""
        return [self._fed[parent] for parent in self.growth.parents(nodes).tolist()]

    def feed(self, nodes: NDArray[np.int64], first: int) -> None:
        """Note that ``nodes`` fed back the rows from ``first`` on."""
        self._fed.update(zip(nodes.tolist(), range(first, first + len(nodes)), strict=True))

    def after(self, nodes: NDArray[np.int64]) -> AskedRows:
        """What may come after ``nodes``."""
        return AskedRows(self.session, len(self.session.tokens) + self.growth.depths(nodes))


@dataclass(frozen=True, kw_only=True, slots=True)
class LastDraft:
    """What a session's last draft was made of.

    Attributes:
        fed: [own rows, h], what its nodes fed back.
        end: position behind the last committed row of the cache, behind which the draft's rows lie.
    """

    growing: GrowingDraft
    fed: torch.Tensor
    end: int
