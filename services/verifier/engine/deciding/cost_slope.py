"""Measures how many seconds longer a pass takes for each draft or model under way meanwhile. Uses no clock."""

from __future__ import annotations

from typing import NamedTuple

from speculation.estimators import DecayingMean, Slope

# Weight of a pass in the averages of passes like it: they follow a machine that changes within some ten passes.
_MEAN_WEIGHT = 0.125
# In passes that differ from the average by one unit per request: how many the estimate remembers, and how many the
# assumption counts as.
_MEMORY, _PRIOR = 40.0, 1.0


class _Usual(NamedTuple):
    """Averages of the passes with about as many requests and rows: units and seconds, per request."""

    units: DecayingMean
    seconds: DecayingMean


class CostSlope:
    """A ``Slope`` of a pass's seconds on its units, both as deviations from the averages of passes like it.

    A unit is a draft under way, or a request that uses a model.

    Args:
        most_slower: a pass counts as at most so much slower or faster than the average, as a share of its time.
        known: how many passes a good estimate needs, if they differ from the average by one unit per request.
        assumed: the assumed cost of a unit, as a share of a pass, until it is known.
    """

    def __init__(self, most_slower: float, *, known: float, assumed: float = 0.0) -> None:
        self._most_slower = most_slower
        self._known = known
        self._assumed = assumed
        self._assumed_s = 0.0
        # By number of requests and of rows, rounded to powers of two.
        self._usual: dict[tuple[int, int], _Usual] = {}
        # Seconds per request on units per request, both as deviations from what is usual.
        self._slope = Slope()

    @property
    def seconds(self) -> float:
        """The estimated cost of one unit."""
        return max(0.0, self._slope.of(self._assumed_s, _PRIOR))

    @property
    def known(self) -> bool:
        """Whether passes have differed enough for a good estimate."""
        return self._slope.whole >= self._known

    def without_s(self, requests: int) -> float:
        """Average seconds of a pass without any unit, for about as many requests; 0 if there were none.

        Only for seconds that were learnt whole, not as differences.
        """
        usual = self._usual.get(_alike(requests))
        return 0.0 if usual is None else max(0.0, usual.seconds.value - self.seconds * usual.units.value) * requests

    def learn(self, *, requests: int, units: float, seconds: float, pass_s: float, rows: int = 0) -> float:
        """Learn from a pass without prompts. Returns by how many units per request it differs from the average.

        Args:
            seconds: its time, or the difference to its expected time.
            pass_s: usual time of a pass like this.
            rows: its rows, if only passes with about as many are compared; 0: all are.
        """
        # Per request, so that batches of any size tell as much.
        share, each_s = units / requests, seconds / requests
        usual = self._usual.get(alike := _alike(requests, rows))
        if usual is None:
            usual = self._usual[alike] = _Usual(DecayingMean(share, _MEAN_WEIGHT), DecayingMean(each_s, _MEAN_WEIGHT))
        self._assumed_s = self._assumed * pass_s
        more, slower = usual.units.add(share), usual.seconds.add(each_s, self._most_slower * pass_s / requests)
        self._slope.learn(more, slower, _MEMORY)
        return more


def _alike(requests: int, rows: int = 0) -> tuple[int, int]:
    return requests.bit_length(), rows.bit_length()
