"""The arithmetic of ``outrider bench sizes``: from what a step's parts cost to the size of the target from which each
drafter pays.

A step drafts, checks the tree in one pass, and does what else a step does; on the cores of one machine these come one after
the other. Plain decoding's step is a pass of one row. So with tau tokens per pass

    speed-up = tau * (plain pass + rest) / (draft + pass over 1 + nodes rows + rest)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PassCurve:
    """Seconds of a pass by its number of rows.

    >>> PassCurve({1: 2.0, 4: 5.0}).at(2)
    3.0
    """

    seconds: Mapping[int, float]

    def at(self, rows: float) -> float:
        """Between measured numbers of rows on a straight line; beyond the last on the last one's; at least the first's."""
        points = sorted(self.seconds.items())
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        (low, first), (high, second) = next(
            (pair for pair in pairwise(points) if rows <= pair[1][0]), (points[-2], points[-1])
        )
        return first + (second - first) * (rows - low) / (high - low)


def stacked(one: Mapping[int, float], several: Mapping[int, float], measured: int, layers: int) -> PassCurve:
    """The passes of a model of ``layers`` equal layers.

    Args:
        one, several: seconds by rows of the same model with one layer, and with ``measured`` of them. The difference is that
            of ``measured`` - 1 layers; what one layer's pass takes besides is output layer, embedding and the like.

    >>> stacked({1: 3.0}, {1: 7.0}, measured=5, layers=11).at(1)
    13.0
    """
    per_layer = {rows: max(0.0, several[rows] - one[rows]) / (measured - 1) for rows in one}
    return PassCurve({rows: one[rows] + (layers - 1) * per_layer[rows] for rows in one})


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedRow:
    """What drafts of one kind brought with the default model.

    Attributes:
        drafter: the drafter; empty: n-grams alone. ``beside``: n-grams draft beside it, one tree.
        budget: most nodes of a tree; ``nodes``: those of its trees, on average.
        tau: tokens per pass.
        text_s: seconds a step of the n-grams' drafts.
        measured: speed over plain decoding's, end to end, with the default model; None: not measured.
    """

    drafter: str
    beside: bool
    budget: int
    nodes: float
    tau: float
    text_s: float
    measured: float | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        if not self.drafter:
            return "n-grams"
        return f"{self.drafter} + n-grams" if self.beside else self.drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeCosts:
    """What steps cost with a target of one size.

    Attributes:
        size: its billions of parameters, as users name it.
        curve: its passes.
        rest_s: what a step takes besides pass and draft.
        drafts_s: seconds of a draft, by drafter and budget.
    """

    size: str
    curve: PassCurve
    rest_s: float
    drafts_s: Mapping[str, Mapping[int, float]]

    @property
    def plain_s(self) -> float:
        """A step of plain decoding."""
        return self.curve.at(1) + self.rest_s

    def draft_s(self, row: DraftedRow) -> float:
        """A step's drafts."""
        return row.text_s + (self.drafts_s[row.drafter][row.budget] if row.drafter else 0.0)

    def speed_up(self, row: DraftedRow) -> float:
        """See this module."""
        return row.tau * self.plain_s / (self.draft_s(row) + self.curve.at(1 + row.nodes) + self.rest_s)


def best(costs: SizeCosts, rows: Sequence[DraftedRow], drafter: str, *, beside: bool) -> DraftedRow:
    """Of a drafter's rows, that of the budget with which it is fastest at this size."""
    own = [row for row in rows if row.drafter == drafter and row.beside == beside]
    return max(own, key=costs.speed_up)


@dataclass(frozen=True, kw_only=True, slots=True)
class Payoff:
    """From which size on a drafter pays; None: at none of those measured.

    Attributes:
        over_plain: alone it is faster than plain decoding.
        over_ngrams: alone it is faster than n-grams alone.
        beside_ngrams: n-grams with it are faster than n-grams alone.
    """

    drafter: str
    over_plain: str | None
    over_ngrams: str | None
    beside_ngrams: str | None


def payoff(drafter: str, sizes: Sequence[SizeCosts], rows: Sequence[DraftedRow]) -> Payoff:
    """The smallest sizes at which, and at every larger one, it pays; ``sizes`` ascending."""

    def gain(costs: SizeCosts, name: str, *, beside: bool) -> float:
        return costs.speed_up(best(costs, rows, name, beside=beside))

    alone = [gain(costs, drafter, beside=False) for costs in sizes]
    together = [gain(costs, drafter, beside=True) for costs in sizes]
    texts = [gain(costs, "", beside=False) for costs in sizes]
    names = [costs.size for costs in sizes]
    return Payoff(
        drafter=drafter,
        over_plain=smallest(names, [own > 1.0 for own in alone]),
        over_ngrams=smallest(names, [own > max(1.0, text) for own, text in zip(alone, texts, strict=True)]),
        beside_ngrams=smallest(names, [both > max(1.0, text) for both, text in zip(together, texts, strict=True)]),
    )


def smallest(sizes: Sequence[str], pays: Sequence[bool]) -> str | None:
    """The first size from which on all pay, so that one that pays by chance does not count.

    >>> smallest(["0.5", "1", "3"], [True, False, True])
    '3'
    """
    found = None
    for size, good in zip(reversed(sizes), reversed(pays), strict=True):
        if not good:
            break
        found = size
    return found
