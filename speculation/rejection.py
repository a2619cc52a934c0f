"""The classic rule, for drafts sampled from a known q: accept with probability min(1, p/q), else draw from the residual.

Chain: Leviathan et al. 2023 (algorithm 1), Chen et al. 2023 (algorithm 2). Several children of a node: one after the other,
each against the residual that the rejections before it left (SpecInfer, Miao et al. 2023; recursive rejection sampling).
A node without a proposal is deterministic: its q is one-hot, so it is accepted with probability p(token), and a rejection
sets that probability to zero.

p is the target's processed distribution, q the draft's. Lossless in distribution; unlike under the walk, which tokens come
out depends on what was drafted.
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
    """Where the rule's chances come from; an enumeration in the tests tries all of them."""

    def coin(self, probability: float, position: int, ordinal: int) -> bool:
        """True with ``probability`` (1 if above); ``ordinal`` counts the coins of a position."""
        ...

    def draw(self, p: Distribution, position: int) -> int:
        """An index, with the probabilities ``p``."""
        ...


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """A pure function of the request's seed and the position."""

    seed: int

    def coin(self, probability: float, position: int, ordinal: int) -> bool:
        """See ``Randomness``."""
        return bool(uniforms(self.seed, NoiseStream.ACCEPT, position, np.array([ordinal]))[0] < probability)

    def draw(self, p: Distribution, position: int) -> int:
        """See ``Randomness``."""
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
        target_at: p after a node (``ROOT``: after the pending token), [vocabulary], with sum 1.
        length: tokens committed so far; the first token decided here has this position.
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
    """The first sibling that passes, and the distribution that the rejections left."""
    for ordinal, child in enumerate(siblings):
        q = _proposal(tree, child, len(p))
        token = tree.tokens[child]
        if randomness.coin(float(p[token] / q[token]), position, ordinal):
            return child, p
        p = residual(p, q)
    return None, p


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm([p - q]+): what is left to draw from after a rejection.

    Where rounding leaves nothing (p equal to q, which a rejection in exact arithmetic excludes), p itself.
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
