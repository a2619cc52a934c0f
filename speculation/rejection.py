"""Rejection sampling for drafts drawn from a known q: accept with probability min(1, p/q), otherwise draw from the residual.

For a chain: Leviathan et al. 2023 (algorithm 1), Chen et al. 2023 (algorithm 2). Several children of a node are tried in
turn, each against the residual that the earlier rejections left (SpecInfer, Miao et al. 2023; recursive rejection sampling).
A node without a proposal is deterministic: its q is one-hot, so it is accepted with probability p(token), and a rejection
sets that probability to zero.

p is the target's processed distribution, q the draft distribution. The rule is lossless in distribution. Unlike under the
acceptance walk, the tokens of one answer depend on what was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from speculation.acceptance import Accepted, StopRule, decided_path
from speculation.choose import sample
from speculation.philox import NoiseStream, uniforms
from speculation.types import TokenTree

Distribution = NDArray[np.float64]


class Randomness(Protocol):
    """The rule's source of randomness. The tests enumerate all outcomes through it."""

    def coin(self, probability: float, position: int, ordinal: int) -> bool:
        """True with ``probability`` (always, if that is above 1); ``ordinal`` numbers the coins of one position."""
        ...

    def draw(self, p: Distribution, position: int) -> int:
        """An index drawn with the probabilities ``p``."""
        ...


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """Implements ``Randomness`` as a pure function of the request's seed and the position."""

    seed: int

    def coin(self, probability: float, position: int, ordinal: int) -> bool:
        return bool(uniforms(self.seed, NoiseStream.ACCEPT, position, np.array([ordinal]))[0] < probability)

    def draw(self, p: Distribution, position: int) -> int:
        with np.errstate(divide="ignore"):
            return sample(np.log(p), self.seed, NoiseStream.RESIDUAL, position)


class DraftTrial:
    """The children of one node, tried in turn against what the rejections before left of p.

    Args:
        target: gives p after the node, [vocabulary] with sum 1; asked once, when it is needed.
    """

    def __init__(
        self, tree: TokenTree, siblings: list[int], target: Callable[[], Distribution], randomness: Randomness, position: int
    ) -> None:
        self._tree, self._siblings, self._target = tree, siblings, target
        self._randomness, self._position = randomness, position
        self._left: list[Distribution] = []

    def accepts(self, ordinal: int) -> bool:
        """Whether the sibling is accepted, where all before it were rejected."""
        p, child = self._after(ordinal), self._siblings[ordinal]
        token = self._tree.tokens[child]
        return self._randomness.coin(float(p[token] / _proposal(self._tree, child, len(p))[token]), self._position, ordinal)

    def draw(self) -> int:
        """A token drawn from what the rejections of all siblings left."""
        return self._randomness.draw(self._after(len(self._siblings)), self._position)

    def _after(self, rejections: int) -> Distribution:
        self._left = self._left or [self._target()]
        for child in self._siblings[len(self._left) - 1 : rejections]:
            self._left.append(residual(self._left[-1], _proposal(self._tree, child, len(self._left[0]))))
        return self._left[rejections]


def accept(tree: TokenTree, trial_at: Callable[[int, list[int], int], DraftTrial], length: int, stop: StopRule) -> Accepted:
    """Walk down the tree by rejection sampling.

    Args:
        trial_at: of the children given, after a node (``ROOT``: after the pending token), at a position.
        length: number of committed tokens, which is the position of the first token decided here.
    """

    def decide(node: int, siblings: list[int], done: int) -> tuple[int | None, int]:
        trial = trial_at(node, siblings, length + done)
        child = next((child for ordinal, child in enumerate(siblings) if trial.accepts(ordinal)), None)
        return child, trial.draw() if child is None else tree.tokens[child]

    return decided_path(tree, decide, stop)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm([p - q]+): the distribution to draw from after a rejection.

    In exact arithmetic no rejection happens where p equals q. If rounding leaves nothing all the same, the result is p.
    """
    rest = np.maximum(p - q, 0.0)
    total = float(rest.sum())
    return rest / total if total > 0 else p


def _proposal(tree: TokenTree, node: int, vocab_size: int) -> Distribution:
    q = np.zeros(vocab_size)
    if tree.proposals:
        proposal = tree.proposals[node]
        q[list(proposal.token_ids)] = proposal.probabilities
        q /= q.sum()
    else:
        q[tree.tokens[node]] = 1.0
    return q
