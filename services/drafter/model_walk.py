"""Walks a model's tree node by node, so that the model takes part in the blend once its tree has arrived."""

from __future__ import annotations

import math
from collections.abc import Iterator

from speculation.messages import StepReport
from speculation.tree import ROOT, children
from speculation.types import TokenTree

# Kinds of candidates: by depth in the model's tree, and by the probability that the model gives them after their parent, in
# halves of bits. The calibrator learns what a probability is worth, not a rank: a model that is sure is mostly right.
_DEPTHS = (1, 2, 4)
_BUCKETS = 12
_PER_BIT = 2


def prior_of_model(name: str) -> dict[str, float]:
    """The prior probabilities of a model's kinds: what it says, a little less further down."""
    return {
        _kind(name, depth, bucket): 0.9 ** (1 + level) * 2 ** (-(bucket + 0.5) / _PER_BIT)
        for level, depth in enumerate(_DEPTHS)
        for bucket in range(_BUCKETS)
    }


def _kind(name: str, depth: int, bucket: int) -> str:
    return f"{name}:{depth}:{bucket}"


class ModelWalk:
    """Implements ``PathSession``. A place is a node of the tree and its depth; there is none before the tree has arrived."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tree: TokenTree | None = None
        self._below: dict[int, list[int]] = {}

    def take(self, tree: TokenTree) -> None:
        """Use the model's tree for the present prefix, until the next step."""
        self._tree = tree
        self._below = children(tree)

    def start(self) -> tuple[int, int] | None:
        return None if self._tree is None else (ROOT, 0)

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int] | None:
        tree = self._tree
        if tree is None:
            return None
        return next(((node, place[1] + 1) for node in self._below.get(place[0], ()) if tree.tokens[node] == token), None)

    def candidates(self, place: tuple[int, int]) -> Iterator[tuple[int, str]]:
        tree, (at, above) = self._tree, place
        if tree is None:
            return
        whole = 1.0 if at == ROOT or not tree.scores else tree.scores[at]
        depth = max(limit for limit in _DEPTHS if limit <= above + 1)
        for node in self._below.get(at, ()):
            share = tree.scores[node] / whole if tree.scores and whole > 0 else 0.5
            bits = -math.log2(share) if share > 0 else math.inf
            yield tree.tokens[node], _kind(self._name, depth, int(min(max(0.0, bits * _PER_BIT), _BUCKETS - 1)))

    def observe(self, report: StepReport) -> None:
        self._tree = None
        self._below = {}

    def catch_up(self) -> bool:
        """No work is deferred."""
        return False

    def close(self) -> None:
        """The model's own session is closed by its group."""
