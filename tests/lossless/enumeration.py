"""Exact enumeration: a rule is run with every possible outcome of its chances, and the probabilities are added up.

An ``Oracle`` stands in for randomness. It replays a list of decisions and, at the first new one, branches: ``outcomes`` runs
the rule once per branch. What comes out is the exact distribution of the whole output, not an estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from speculation.rejection import Distribution, DraftTrial
from speculation.tree import ROOT
from speculation.types import Proposal, TokenTree

VOCAB = 4
LENGTH = 3

Output = tuple[int, ...]


class Oracle:
    """Implements ``speculation.rejection.Randomness``, and draws for everything else that is random."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.branches: list[list[float]] = []
        self.probability = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """One of several outcomes with these probabilities."""
        step = len(self.branches)
        if step == len(self._script):
            self._script.append(next(i for i, weight in enumerate(weights) if weight > 0))
        self.branches.append(list(weights))
        self.probability *= weights[self._script[step]]
        return self._script[step]

    def coin(self, probability: float, position: int, ordinal: int) -> bool:
        chance = min(max(probability, 0.0), 1.0)
        return self.choose([1 - chance, chance]) == 1

    def draw(self, p: Distribution, position: int) -> int:
        return self.choose(p.tolist())

    def next_script(self) -> list[int] | None:
        """The decisions of the next run, depth first; None when all are done."""
        script = self._script[: len(self.branches)]
        while script:
            weights = self.branches[len(script) - 1]
            later = [i for i in range(script[-1] + 1, len(weights)) if weights[i] > 0]
            if later:
                return [*script[:-1], later[0]]
            script.pop()
        return None


def trials(
    tree: TokenTree, target_at: Callable[[int], Distribution], oracle: Oracle
) -> Callable[[int, list[int], int], DraftTrial]:
    """The rejection rule's trials with p after each node as ``target_at`` says."""

    def trial_at(node: int, siblings: list[int], position: int) -> DraftTrial:
        return DraftTrial(tree, siblings, lambda: target_at(node), oracle, position)

    return trial_at


def outcomes(run: Callable[[Oracle], Output]) -> dict[Output, float]:
    """The exact distribution of what ``run`` returns."""
    total: dict[Output, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        oracle = Oracle(script)
        total[run(oracle)] += oracle.probability
        script = oracle.next_script()
    return dict(total)


def target(prefix: Sequence[int]) -> Distribution:
    """p after ``prefix``: uneven, and different everywhere."""
    return _table(prefix, 11)


def draft(prefix: Sequence[int]) -> Distribution:
    """q after ``prefix``: not p, yet not unlike it."""
    mixed = 0.5 * _table(prefix, 11) + 0.5 * _table(prefix, 23)
    return mixed / mixed.sum()


def _table(prefix: Sequence[int], salt: int) -> Distribution:
    rng = np.random.default_rng([salt, len(prefix), *prefix])
    weights = rng.random(VOCAB) ** 2 + 0.02
    return weights / weights.sum()


def complete(tokens: Sequence[int], oracle: Oracle) -> Output:
    """Cut or continue plainly to ``LENGTH`` tokens, so that passes of different yield can be compared."""
    output = list(tokens[:LENGTH])
    while len(output) < LENGTH:
        output.append(oracle.choose(target(output).tolist()))
    return tuple(output)


def plain() -> dict[Output, float]:
    """The distribution of plain decoding."""
    return outcomes(lambda oracle: complete((), oracle))


def distance(left: dict[Output, float], right: dict[Output, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())


def tree_of(tokens: tuple[int, ...], parents: tuple[int, ...], proposals: tuple[Proposal, ...] = ()) -> TokenTree:
    return TokenTree(tokens=tokens, parents=parents, sources=("test",) * len(tokens), proposals=proposals)


def sampled_tree(
    oracle: Oracle, q_after: Callable[[Sequence[int]], Distribution], children: int, depth: int, replacement: bool
) -> TokenTree:
    """``children`` siblings per level, drawn from q after their prefix (afresh, or without those drawn before); the first one goes on."""
    tokens: list[int] = []
    parents: list[int] = []
    proposals: list[Proposal] = []
    prefix: list[int] = []
    parent = ROOT
    for _ in range(depth):
        q = q_after(prefix)
        first = len(tokens)
        for _ in range(children):
            token = oracle.choose(q.tolist())
            kept = np.flatnonzero(q)
            proposals.append(Proposal(token_ids=tuple(kept.tolist()), probabilities=tuple(q[kept].tolist())))
            tokens.append(token)
            parents.append(parent)
            if not replacement:
                q = np.where(np.arange(len(q)) == token, 0.0, q)
                q = q / q.sum()
        prefix.append(tokens[first])
        parent = first
    return tree_of(tuple(tokens), tuple(parents), tuple(proposals))
