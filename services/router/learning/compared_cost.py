"""What a strategy costs, compared with ``auto`` on the same answers: an estimate, and how far it may be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from speculation.estimators import Ratio

# In plain steps, the time that plain decoding takes for a token: how many of them are remembered of a context, and as how
# many what is assumed of it counts.
MEMORY, PRIOR = 20_000.0, 200.0
# How far a context's cost is from that of what it is a kind of, typically; and that of any context from 1.
APART = 0.1
# How many numbers a cost is written as.
NUMBERS = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A cost, as a share of that of ``auto``, and its standard error."""

    cost: float
    error: float


@dataclass(slots=True)
class ComparedCost(Ratio):
    """The cost of a strategy (``part``) over that of ``auto`` (``whole``), in plain steps, of answers of one context.

    Old answers fade. All that it holds are sums, so what several routers have seen is added up.

    >>> cost = ComparedCost()
    >>> for own in (80.0, 70.0, 90.0, 80.0):
    ...     cost.learn(own, 100.0)
    >>> found = cost.estimate(Estimate(1.0, 0.1))
    >>> round(found.cost, 3), round(found.error, 3)
    (0.867, 0.046)

    Attributes:
        own_squares, products, auto_squares: sums of the squares of both, and of their products.
    """

    own_squares: float = 0.0
    products: float = 0.0
    auto_squares: float = 0.0

    def learn(self, own: float, auto: float) -> None:
        """Add an answer, both in plain steps."""
        self.add_cost(cost_of(own, auto))

    def add_cost(self, other: ComparedCost) -> None:
        """Add what another one has of other answers; the old ones fade for them."""
        self.fade(MEMORY, other.whole)
        self.add(other.part, other.whole)
        self.own_squares += other.own_squares
        self.products += other.products
        self.auto_squares += other.auto_squares

    @override
    def keep(self, share: float) -> None:
        """Let all sums fade to a share of what they were."""
        Ratio.keep(self, share)
        self.own_squares *= share
        self.products *= share
        self.auto_squares *= share

    @property
    def numbers(self) -> tuple[float, ...]:
        """Its sums."""
        return self.part, self.whole, self.own_squares, self.products, self.auto_squares

    def estimate(self, assumed: Estimate) -> Estimate:
        """The estimate, shrunk towards what is assumed.

        The answers' own part of the error is that of a ratio of sums: how far answers lie from the line through 0.
        """
        cost = self.of(assumed.cost, PRIOR)
        scatter = max(0.0, self.own_squares - 2 * cost * self.products + cost * cost * self.auto_squares)
        error = math.sqrt(scatter + (PRIOR * assumed.error) ** 2) / (self.whole + PRIOR)
        return Estimate(cost, error)


def cost_of(own: float, auto: float) -> ComparedCost:
    """The cost of one answer, both in plain steps."""
    return ComparedCost(own, auto, own * own, own * auto, auto * auto)
