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

from speculation.acceptance import Accepted, StopRule
from speculation.choose import sample
from speculation.philox import NoiseStream, uniforms
from speculation.tree import ROOT, children
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


def accept(
    tree: TokenTree,
    target_at: Callable[[int], Distribution],
    randomness: Randomness,
    length: int,
    stop: StopRule,
) -> Accepted:
    """Walk down the tree by rejection sampling.

    Args:
        target_at: p after a node (``ROOT``: after the pending token), [vocabulary] with sum 1.
        length: number of committed tokens, which is the position of the first token decided here.
    """
    below = children(tree)
    node = ROOT
    path: list[int] = []
    tokens: list[int] = []
    while True:
        position = length + len(tokens)
        accepted, rest = _try_children(tree, below.get(node, []), target_at(node), randomness, position)
        if accepted is None:
            tokens.append(randomness.draw(rest, position))
        else:
            path.append(accepted)
            node = accepted
            tokens.append(tree.tokens[accepted])
        finish = stop.after(tokens)
        if finish is not None or accepted is None:
            return Accepted(path=tuple(path), tokens=tuple(tokens), finish_reason=finish)


def _try_children(
    tree: TokenTree, siblings: list[int], p: Distribution, randomness: Randomness, position: int
) -> tuple[int | None, Distribution]:
    """The first sibling that is accepted, or None; and the distribution that the rejections left."""
    for ordinal, child in enumerate(siblings):
        q = _proposal(tree, child, len(p))
        token = tree.tokens[child]
        if randomness.coin(float(p[token] / q[token]), position, ordinal):
            return child, p
        p = residual(p, q)
    return None, p


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
