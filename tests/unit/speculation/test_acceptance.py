"""Which nodes of a tree are accepted, and where an answer ends: the walk, and the rule that decides child by child."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from speculation.acceptance import Accepted, StopRule, decided_path, walk
from speculation.rejection import Distribution, DraftTrial
from speculation.tree import ROOT
from speculation.types import FinishReason, Proposal, TokenTree

FORK = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("a",) * 4)
GOES_ON = StopRule(stop_token_ids=frozenset(), generated=0, room=100)


def test_a_probe_is_never_accepted() -> None:
    tree = TokenTree(tokens=(7, 7, 8), parents=(ROOT, ROOT, 1), sources=("a",) * 3, probes=(0,))
    assert walk(tree, {ROOT: 7, 1: 8, 2: 5}.__getitem__, GOES_ON).path == (1, 2)
    none = Accepted(path=(), tokens=(7,), finish_reason=None)
    assert walk(replace(tree, probes=(0, 1, 2)), {ROOT: 7}.__getitem__, GOES_ON) == none


def test_the_rule_is_asked_from_child_to_accepted_child() -> None:
    asked: list[tuple[int, list[int], int]] = []

    def decide(node: int, siblings: list[int], done: int) -> tuple[int | None, int]:
        asked.append((node, siblings, done))
        child = {ROOT: 0, 0: 1, 1: 3}.get(node)
        return child, 2 if child is None else FORK.tokens[child]

    assert decided_path(FORK, decide, GOES_ON) == Accepted(path=(0, 1, 3), tokens=(7, 8, 5, 2), finish_reason=None)
    assert asked == [(ROOT, [0], 0), (0, [1], 1), (1, [2, 3], 2), (3, [], 3)]
    stopped = decided_path(FORK, decide, replace(GOES_ON, stop_token_ids=frozenset({8})))
    assert stopped == Accepted(path=(0, 1), tokens=(7, 8), finish_reason=FinishReason.STOP)
    full = decided_path(FORK, decide, replace(GOES_ON, generated=97))
    assert full == Accepted(path=(0, 1, 3), tokens=(7, 8, 5), finish_reason=FinishReason.LENGTH)


class Noted:
    """Implements ``Randomness``: rejects everything, and notes what it is asked."""

    def __init__(self) -> None:
        self.coins: list[float] = []
        self.drawn: list[list[float]] = []

    def coin(self, probability: float, position: int, ordinal: int) -> bool:
        self.coins.append(probability)
        return False

    def draw(self, p: Distribution, position: int) -> int:
        self.drawn.append(p.tolist())
        return 0


def test_a_proposal_counts_by_its_shares_though_they_came_rounded() -> None:
    """A drafter's probabilities have a sum of nearly 1 once they have travelled."""
    proposal = Proposal(token_ids=(1, 2), probabilities=(0.5, 0.4995))
    tree = TokenTree(tokens=(1,), parents=(ROOT,), sources=("a",), proposals=(proposal,))
    noted = Noted()
    trial = DraftTrial(tree, [0], lambda: np.array([0.25, 0.25, 0.5]), noted, 7)
    assert not trial.accepts(0) and trial.draw() == 0
    share = 0.5 / 0.9995
    assert noted.coins == [pytest.approx(0.25 / share, rel=1e-12)]
    left = np.array([0.25, 0.0, 0.5 - (1 - share)])
    assert noted.drawn == [pytest.approx(left / left.sum(), rel=1e-9)]
