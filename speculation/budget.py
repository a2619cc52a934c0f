"""How many drafted nodes a step checks, and which."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from speculation.acceptance_rates import AcceptanceRates
from speculation.costs import CostTable, Load
from speculation.tree import claims, take
from speculation.types import EMPTY_TREE, TokenTree

# After so many steps without a node a few are waited for and checked all the same: else nobody would ever learn that drafts,
# or rows, have become better than they were.
_EXPLORE_EVERY = 32
_EXPLORED = 2
# Drafters may think less of a node than it turns out to be worth: they are asked for somewhat less likely ones, too.
_SLACK = 0.75
# A prompt always gets on by so many rows: they cost little more than one.
_PROMPT_ROWS = 16
# Steps with prompts are planned for this share of ``max_step_s``: the rest is for what the machine does meanwhile.
_PROMPT_SHARE = 0.8
# Weight of a new measurement of what prompts cost.
_PROMPT_WEIGHT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a draft should hold: at most ``nodes`` nodes, none that is accepted with less than ``min_probability``."""

    nodes: int
    min_probability: float = 0.0


class Budget(Protocol):
    """A policy. Choosing no node is plain decoding."""

    @property
    def max_nodes(self) -> int:
        """Most nodes of one request's tree, ever."""

    def seconds(self, load: Load) -> float:
        """How long a pass takes; infinite where time does not count."""

    def probabilities(self, tree: TokenTree) -> list[float]:
        """For every node of a tree the probability that the target takes the path to it."""

    def wanted(self, load: Load) -> Wanted:
        """What drafts for a step beside ``load`` should hold. Where that is nothing, nobody waits for one."""

    def prompt_rows(self, load: Load, most: int, keys: int) -> int:
        """How many rows of prompts, at most ``most``, the coming step computes beside the decoding requests in ``load``.

        ``keys`` tokens of the prompt that has got farthest are computed already.
        """

    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        """The part of each tree that the coming step checks, beside ``load``, which counts no node.

        There is one tree, empty or not, for every request that the step gives a token. ``load`` holds prompts besides;
        ``decoding`` is what it would be without them.
        """

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        """Take note of a pass: what it held, nodes included, what it took, and each checked tree's accepted path."""

    def learn_prompts(self, load: Load, seconds: float) -> None:
        """Take note of a pass that computed prompts: another kind of work, which says nothing about nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBudget:
    """Everything that was drafted, at any load."""

    max_nodes: int

    def seconds(self, load: Load) -> float:
        return math.inf

    def probabilities(self, tree: TokenTree) -> list[float]:
        return claims(tree)

    def wanted(self, load: Load) -> Wanted:
        return Wanted(nodes=self.max_nodes)

    def prompt_rows(self, load: Load, most: int, keys: int) -> int:
        return most

    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        return list(trees)

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        """See ``Budget``: nothing is learnt."""

    def learn_prompts(self, load: Load, seconds: float) -> None:
        """See ``Budget``: nothing is learnt."""


class MeasuredBudget:
    """The nodes of all live requests compete for the number of rows that maximises expected tokens per second.

    Expected tokens of a step are one for each request and, for each node, the probability that it is accepted: exactly so,
    if the probabilities are right. (reference: DSpark's scheduler, with measured costs, on trees)

    Args:
        max_step_s: longest that a step shall take for the sake of prompts while other requests are being decoded.
    """

    def __init__(self, costs: CostTable, *, max_nodes: int, max_step_s: float = math.inf) -> None:
        self.max_nodes = max_nodes
        self._max_step_s = max_step_s
        self._costs = costs
        self._acceptance = AcceptanceRates()
        self._steps_without = 0
        # What a pass with prompts takes, measured against what the table expects.
        self._prompt_factor = 1.0

    def seconds(self, load: Load) -> float:
        return self._costs.seconds(load)

    def probabilities(self, tree: TokenTree) -> list[float]:
        return self._acceptance.probabilities(tree)

    def wanted(self, load: Load) -> Wanted:
        """See ``Budget``: a node must bring what plain decoding does in the time of a row, where rows are cheapest."""
        alone, requests = self._costs.seconds(load), max(1, load.requests)
        counts = [2**power for power in range((requests * self.max_nodes).bit_length())]
        cheapest = min(((self._costs.seconds(load.plus(rows)) - alone) / rows for rows in counts), default=math.inf)
        least = cheapest * requests / alone
        if least < 1:
            return Wanted(nodes=self.max_nodes, min_probability=_SLACK * least)
        return Wanted(nodes=min(_EXPLORED, self.max_nodes) if self._explores() else 0)

    def prompt_rows(self, load: Load, most: int, keys: int) -> int:
        """See ``Budget``: all where nobody is kept waiting by it, else what ``max_step_s`` leaves time for."""
        least = min(most, _PROMPT_ROWS)

        def seconds(rows: int) -> float:
            # The rows of a chunk see each other too.
            return self._prompt_factor * self._costs.seconds(load.plus_request(rows, keys + rows // 2))

        limit = _PROMPT_SHARE * self._max_step_s
        if not load.requests or seconds(most) <= limit:
            return most
        return max(least, bisect_right(range(most), limit, key=seconds) - 1)

    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        """See ``Budget``. Sampled trees (``proposals``) are taken whole: leaving tokens out after they were seen would bias
        the rejection rule."""
        fixed = sum(len(tree) for tree in trees if tree.proposals)
        load, decoding = load.plus(fixed), decoding.plus(fixed)
        candidates = [
            (probability, index, node)
            for index, tree in enumerate(trees)
            if not tree.proposals
            for node, probability in enumerate(self._acceptance.probabilities(tree))
        ]
        # Parents come before their children: they are at least as probable, and stand first.
        candidates.sort(key=lambda candidate: -candidate[0])
        count = self._best_count(len(trees), [probability for probability, _, _ in candidates], load, decoding)
        self._steps_without = 0 if count else self._steps_without + 1
        if self._steps_without == _EXPLORE_EVERY:
            self._steps_without, count = 0, min(_EXPLORED, len(candidates))
        kept: dict[int, list[int]] = {}
        for _, index, node in candidates[:count]:
            kept.setdefault(index, []).append(node)
        return [
            tree if tree.proposals or len(kept.get(index, ())) == len(tree) else _part(tree, kept.get(index))
            for index, tree in enumerate(trees)
        ]

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        self._costs.learn(load, seconds)
        for tree, accepted_path in outcomes:
            self._acceptance.learn(tree, accepted_path)

    def learn_prompts(self, load: Load, seconds: float) -> None:
        ratio = min(4.0, max(0.25, seconds / self._costs.seconds(load)))
        self._prompt_factor += _PROMPT_WEIGHT * (ratio - self._prompt_factor)

    def _best_count(self, tokens: int, probabilities: Sequence[float], load: Load, decoding: Load) -> int:
        """How many of the likeliest nodes, beside ``tokens`` that are certain, are worth their rows.

        What a second of the target is worth, steps without prompts say: the most tokens that one could give in it. Prompts
        take the same time whether nodes are checked beside them or not; that a step is long makes no node cheaper.
        """
        worth = max(self._rates(tokens, probabilities, decoding))
        gains, before = [0.0], self._costs.seconds(load)
        for count, probability in enumerate(probabilities, 1):
            after = self._costs.seconds(load.plus(count))
            gains.append(gains[-1] + probability - worth * (after - before))
            before = after
        return max(range(len(gains)), key=gains.__getitem__)

    def _rates(self, tokens: int, probabilities: Sequence[float], load: Load) -> Iterator[float]:
        """Tokens per second of a step with no node, with the likeliest, with the two likeliest, ..."""
        expected = float(tokens)
        yield expected / self._costs.seconds(load)
        for count, probability in enumerate(probabilities, 1):
            expected += probability
            yield expected / self._costs.seconds(load.plus(count))

    def _explores(self) -> bool:
        return self._steps_without == _EXPLORE_EVERY - 1


def _part(tree: TokenTree, nodes: list[int] | None) -> TokenTree:
    return take(tree, sorted(nodes)) if nodes else EMPTY_TREE
