"""How many drafted nodes a step checks, and which."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from speculation.acceptance_rates import AcceptanceRates
from speculation.costs import CostTable, Load, slowdown
from speculation.estimators import DecayingMean
from speculation.tree import claims, take
from speculation.types import EMPTY_TREE, TokenTree

# After so many steps without a node, a few are drafted and checked all the same. Otherwise nobody would learn that drafts
# have become better, or rows cheaper.
_EXPLORE_EVERY = 32
_EXPLORED = 2
# Drafters may underestimate a node, so they are asked for somewhat less likely ones, too.
_SLACK = 0.75
# Smallest prompt chunk, in rows, whatever the time: so few cost little more than one.
_PROMPT_ROWS = 16
# Steps with prompts are planned for this share of ``max_step_s``; the rest is reserve for other work on the machine.
_PROMPT_SHARE = 0.8
# No step has more nodes beside prompts.
_MOST_BESIDE = 1 << 14
# Weight of a new measurement in the cost of prompts.
_PROMPT_WEIGHT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a draft should hold: at most ``nodes`` nodes, each accepted with probability ``min_probability`` or more."""

    nodes: int
    min_probability: float = 0.0


class Budget(Protocol):
    """Decides how many drafted nodes a step checks. Choosing none is plain decoding."""

    @property
    def max_nodes(self) -> int:
        """Most nodes of one request's tree, ever."""

    def seconds(self, load: Load) -> float:
        """How long a pass takes; infinite for a budget that ignores time."""

    def prompt_seconds(self, load: Load) -> float:
        """How long a pass with prompts takes."""

    def probabilities(self, tree: TokenTree) -> list[float]:
        """For every node of a tree, the probability that the target takes the path to it."""

    def wanted(self, load: Load) -> Wanted:
        """What drafts for a step should hold beside ``load``. If that is nothing, nobody waits for a draft."""

    def prompt_rows(self, load: Load, most: int, keys: int) -> int:
        """How many rows of prompts, at most ``most``, the coming step computes beside the decoding requests in ``load``.

        ``keys``: tokens already computed of the prompt that is furthest along.
        """

    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        """The part of each tree that the coming step checks.

        There is one tree, empty or not, for every request that gets a token in this step. ``load`` is the step without any
        node, its prompt chunks included; ``decoding`` is the same without prompt chunks.
        """

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        """Learn from a pass: what it held (nodes included), how long it took, each checked tree and its accepted path."""

    def learn_prompts(self, load: Load, seconds: float) -> None:
        """Learn from a pass that computed prompts; it says nothing about the cost of nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBudget:
    """Checks everything that was drafted, at any load."""

    max_nodes: int

    def seconds(self, load: Load) -> float:
        return math.inf

    def prompt_seconds(self, load: Load) -> float:
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
        """Learns nothing."""

    def learn_prompts(self, load: Load, seconds: float) -> None:
        """Learns nothing."""


class MeasuredBudget:
    """The nodes of all live requests compete for the number of rows that maximises expected tokens per second.

    A step's expected tokens are one per request plus the sum of its nodes' probabilities of acceptance; this is exact if the
    probabilities are right. (reference: DSpark's scheduler, with measured costs, on trees)

    On this machine a pass of five rows takes as long as one of a single row, and further rows are dear. Two requests take a
    row each, so three nodes cost nothing. The three likeliest are checked, whichever request they belong to:

    >>> from speculation.tree import chain
    >>> costs = CostTable(by_rows={1: 1.0, 5: 1.0, 6: 2.0}, per_request=0.0, per_key=0.0)
    >>> two = Load(rows=2, requests=2, keys=0)
    >>> sure, unsure = chain([1, 2, 3], "s", [0.9, 0.8, 0.3]), chain([5, 6], "s", [0.5, 0.2])
    >>> [tree.tokens for tree in MeasuredBudget(costs, max_nodes=8).choose([sure, unsure], two, two)]
    [(1, 2), (5,)]

    Where every row costs a pass of its own, no node is worth it, and the step decodes plainly:

    >>> dear = CostTable(by_rows={1: 1.0, 2: 2.0}, per_request=0.0, per_key=0.0)
    >>> [tree.tokens for tree in MeasuredBudget(dear, max_nodes=8).choose([sure, unsure], two, two)]
    [(), ()]

    Args:
        max_step_s: longest step, in seconds, that prompts may cause while other requests are being decoded.
    """

    def __init__(self, costs: CostTable, *, max_nodes: int, max_step_s: float = math.inf) -> None:
        self.max_nodes = max_nodes
        self._max_step_s = max_step_s
        self._costs = costs
        self._acceptance = AcceptanceRates()
        self._steps_without = 0
        # Measured over expected seconds of passes with prompts.
        self._prompt_factor = DecayingMean(1.0, newest=_PROMPT_WEIGHT)

    def seconds(self, load: Load) -> float:
        return self._costs.seconds(load)

    def prompt_seconds(self, load: Load) -> float:
        return self._prompt_factor.value * self._costs.seconds(load)

    def probabilities(self, tree: TokenTree) -> list[float]:
        return self._acceptance.probabilities(tree)

    def wanted(self, load: Load) -> Wanted:
        """A node must bring at least the tokens that plain decoding yields in the time of one row, at the cheapest rows."""
        alone, requests = self._costs.seconds(load), max(1, load.requests)
        counts = [2**power for power in range((requests * self.max_nodes).bit_length())]
        cheapest = min(((self._costs.seconds(load.plus(rows)) - alone) / rows for rows in counts), default=math.inf)
        least = cheapest * requests / alone
        if least < 1:
            return Wanted(nodes=self.max_nodes, min_probability=_SLACK * least)
        return Wanted(nodes=min(_EXPLORED, self.max_nodes) if self._explores() else 0)

    def prompt_rows(self, load: Load, most: int, keys: int) -> int:
        """All rows if no request is being decoded, else as many as ``max_step_s`` leaves time for."""
        least = min(most, _PROMPT_ROWS)

        def seconds(rows: int) -> float:
            # The rows of a chunk see each other too.
            return self.prompt_seconds(load.plus_request(rows, keys + rows // 2))

        limit = _PROMPT_SHARE * self._max_step_s
        if not load.requests or seconds(most) <= limit:
            return most
        return max(least, bisect_right(range(most), limit, key=seconds) - 1)

    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        """Sampled trees (``proposals``) stay whole: dropping tokens after they were drawn would bias the rejection rule.

        Beside prompts, nodes get the time that these leave of what they may stretch a step to: first tokens come no later.
        """
        fixed = sum(len(tree) for tree in trees if tree.proposals)
        most = self._most_beside(load) if load.rows > decoding.rows else math.inf
        if fixed > most:
            # All of them, whatever they hold: that is no bias.
            trees, fixed = [EMPTY_TREE if tree.proposals else tree for tree in trees], 0
        open_trees = [tree for tree in trees if not tree.proposals]
        order, count = self._ranked(open_trees, len(trees), most - fixed, load.plus(fixed), decoding.plus(fixed))
        self._steps_without = 0 if count else self._steps_without + 1
        if self._steps_without == _EXPLORE_EVERY:
            self._steps_without, count = 0, min(_EXPLORED, len(order))
        nodes = sum([len(tree.tokens) for tree in open_trees])
        if count == nodes:
            return list(trees)
        chosen = bytearray(nodes)
        for node in order[:count]:
            chosen[node] = 1
        ends = accumulate([0 if tree.proposals else len(tree.tokens) for tree in trees])
        return [
            tree if tree.proposals else _part(tree, chosen[end - len(tree.tokens) : end])
            for tree, end in zip(trees, ends, strict=True)
        ]

    def _ranked(
        self, trees: Sequence[TokenTree], tokens: int, most: float, load: Load, decoding: Load
    ) -> tuple[Sequence[int], int]:
        """The nodes of all trees, the ``most`` likeliest first, and how many of them are worth their rows.

        Nodes are numbered over all trees. ``tokens`` are certain; ``load`` and ``decoding`` as for ``choose``.
        """
        chances = [probability for tree in trees for probability in self._acceptance.probabilities(tree)]
        # Parents come before their children: they are at least as probable, and the sort is stable.
        order = sorted(range(len(chances)), key=lambda node: -chances[node])
        most = int(min(most, len(order)))
        return order[:most], self._best_count(tokens, [chances[node] for node in order], most, load, decoding)

    def _most_beside(self, load: Load) -> float:
        """How many nodes there is time for in a step that computes prompts."""
        limit = _PROMPT_SHARE * self._max_step_s
        if math.isinf(limit):
            return math.inf
        return max(0, bisect_right(range(_MOST_BESIDE), limit, key=lambda rows: self.prompt_seconds(load.plus(rows))) - 1)

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        self._costs.learn(load, seconds)
        for tree, accepted_path in outcomes:
            self._acceptance.learn(tree, accepted_path)

    def learn_prompts(self, load: Load, seconds: float) -> None:
        self._prompt_factor.add(slowdown(seconds, self._costs.seconds(load)))

    def _best_count(self, tokens: int, probabilities: Sequence[float], most: int, load: Load, decoding: Load) -> int:
        """How many of the likeliest nodes, at most ``most``, are worth their rows, beside ``tokens`` that are certain.

        A second of the target is worth the most tokens per second that a step without prompts could yield. Prompts take
        the same time with or without nodes beside them, so a step that they make long makes no node cheaper.
        """
        worth = max(self._rates(tokens, probabilities, decoding))
        gains, before = [0.0], self._costs.seconds(load)
        for count, probability in enumerate(probabilities[:most], 1):
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


def _part(tree: TokenTree, chosen: bytearray) -> TokenTree:
    """A tree's chosen nodes; ``chosen`` has a 1 for each of them."""
    count = chosen.count(1)
    if count == len(tree.tokens):
        return tree
    return take(tree, [node for node, kept in enumerate(chosen) if kept]) if count else EMPTY_TREE
