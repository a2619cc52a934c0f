"""Lookahead's window: guesses at tokens further ahead, corrected by every pass (Fu et al., 2024, arXiv 2402.02057).

``width`` columns follow the text, one position apart. Each is a short trajectory: a token, the model's choice after it, its
choice after that, and so on. Their nodes are probes: computed, but never accepted. A column's first token sees the text and
the first tokens of the columns before it; its other tokens see their own column as well. So the window is a tree. Each pass
lengthens every column by a token. A full column is an n-gram that the model itself has produced; it then loses its first
token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from speculation.messages import StepReport
from speculation.tree import ROOT
from speculation.types import TokenTree

# Chooses which of the model's likeliest tokens after a column becomes its next one.
Choose = Callable[[Sequence[int]], int]

# Value of a probe, in accepted tokens per step, before any was computed; and weight of each step that measures it.
_FIRST_WORTH = 0.02
_WORTH_WEIGHT = 0.05


class Window:
    """The columns of one request.

    Args:
        ngram: N, length of the n-grams that it yields.
        width: W, most columns.
        tokens: the prompt; columns begin as random tokens of it.
    """

    def __init__(self, *, ngram: int, width: int, tokens: Sequence[int], seed: int) -> None:
        self._depth = ngram - 1
        # The window only guesses: its random numbers need no quality, they only must be the same in every run.
        source = random.Random(seed)
        self._columns = [[source.choice(tokens)] for _ in range(width)]
        self._worth = _FIRST_WORTH

    def attach(self, tree: TokenTree, source: str, rows: int) -> TokenTree:
        """``tree`` with as many columns as fit into ``rows`` rows, as probes."""
        tokens, parents = list(tree.tokens), list(tree.parents)
        probes: list[int] = []
        first = ROOT
        for column in self._columns:
            if len(probes) + len(column) > rows:
                break
            for level, token in enumerate(column):
                parents.append(first if level == 0 else len(tokens) - 1)
                probes.append(len(tokens))
                tokens.append(token)
            first = probes[-len(column)]
        return TokenTree(
            tokens=tuple(tokens),
            parents=tuple(parents),
            sources=tree.sources + (source,) * len(probes),
            scores=tree.scores + (self._worth,) * len(probes),
            probes=tuple(probes),
        )

    def advance(self, report: StepReport, choose: Choose) -> list[tuple[int, ...]]:
        """Lengthen the columns that a pass has computed; returns the n-grams that are complete.

        If rows are expensive, a pass computes only the first columns, or none.
        """
        seen = report.observation
        if seen is None or not seen.probe_ids:
            return []
        self._worth += _WORTH_WEIGHT * (min(1.0, len(report.accepted_path) / len(seen.probe_ids)) - self._worth)
        complete: list[tuple[int, ...]] = []
        at = 0
        for column in self._columns:
            nodes = seen.tree.probes[at : at + len(column)]
            at += len(column)
            # Near the end of an answer trees are cut by depth, and columns with them.
            if [seen.tree.tokens[node] for node in nodes] != column or at > len(seen.probe_ids):
                break
            column.append(choose(seen.probe_ids[at - 1]))
            if len(column) > self._depth:
                complete.append(tuple(column))
                del column[0]
        return complete
