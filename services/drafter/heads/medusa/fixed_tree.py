"""Medusa's fixed tree: the same ranks at every step, however sure the heads are (arXiv 2401.10774, section 2.3.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from typing_extensions import override

from services.drafter.config import Choices
from services.drafter.heads.beam import GrowingTree, Indices, Numbers
from speculation.tree import ROOT

# Paths of ranks, a digit for each head, the likeliest first as the authors found them; parents come before children.
_MC_SIM_7B_63 = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000
011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""
CHOICES: Mapping[Choices, tuple[str, ...]] = {"mc_sim_7b_63": tuple(_MC_SIM_7B_63.split())}


class FixedTree(GrowingTree):
    """The first ``max_nodes`` of the fixed paths. Implements ``TreeGrowth``.

    Paths deeper than the heads guess, and tokens that cannot come, are left out with what hangs on them.
    """

    def __init__(self, max_nodes: int, choices: Choices) -> None:
        super().__init__()
        self._wanted = set(CHOICES[choices][:max_nodes])
        self.children = 1 + max(int(path[-1]) for path in self._wanted)
        self.rows = len(self._wanted)
        # By node of the pool: its path.
        self._paths: list[str] = []
        self._newest = 0

    def add(self, tokens: Indices, logs: Numbers) -> None:
        tokens, logs = tokens[:, : self.children], logs[:, : self.children]
        self._newest = len(self._paths)
        above = ["" if node == ROOT else self._paths[node] for node in self._run.tolist()]
        self.pool.extend(self._run, tokens, logs)
        self._paths += [f"{path}{rank}" for path in above for rank in range(tokens.shape[1])]

    def grow(self) -> Indices:
        inner = {path[:-1] for path in self._wanted}
        newest = range(self._newest, len(self._paths))
        found = [node for node in newest if self._paths[node] in inner and self._there(node)]
        self._run = np.array(found, dtype=np.int64)
        return self._run

    @override
    def draft(self) -> Indices:
        kept = [node for node, path in enumerate(self._paths) if path in self._wanted and self._there(node)]
        return np.array(kept, dtype=np.int64)

    def _there(self, node: int) -> bool:
        return bool(self.pool.scores[node] > -np.inf)
