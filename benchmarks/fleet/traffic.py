"""The requests of a day, drawn from a seed."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DAY_S = 86_400.0
# Load by the hour, of one region: least at four in the morning, two peaks in office hours, 4.5 to 1. An assumption, of the
# shape that public traces of chat services show on a weekday.
_HOURS = (
    0.52, 0.42, 0.35, 0.31, 0.30, 0.33, 0.42, 0.60, 0.88, 1.18, 1.32, 1.30,
    1.18, 1.25, 1.35, 1.34, 1.28, 1.15, 1.02, 0.95, 0.92, 0.88, 0.77, 0.64,
)  # fmt: skip


class Arrival(NamedTuple):
    """One request.

    Attributes:
        at_s: seconds from the beginning of the day.
        conversation: requests of one conversation begin alike.
        prompt: its tokens, those of earlier turns included.
        answer: tokens that it will get.
    """

    at_s: float
    conversation: int
    prompt: int
    answer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Numbers of tokens, log-normal: ``median``, and ``mean``, which is above it; at most ``most``."""

    median: float
    mean: float
    most: int

    def draw(self, source: random.Random) -> int:
        """A number of tokens, at least 1."""
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        return max(1, min(self.most, round(source.lognormvariate(math.log(self.median), sigma))))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficConfig:
    """A day of requests.

    Medians and means of chats are those of Azure's conversation trace of 2023 (Splitwise, https://arxiv.org/abs/2311.18677);
    that a share of the answers is long, as reasoning models write them, and the times between turns are assumptions.

    Attributes:
        per_s: conversations that begin each second, on the day's average.
        days: length of what is drawn; may be less than one.
        new: tokens that a turn adds to the prompt.
        chat: tokens of a short answer.
        long: tokens of a long one.
        long_share: share of the turns with a long answer.
        turns: mean number of turns of a conversation (geometric).
        think_s: median seconds from one turn to the next (log-normal, sigma 1).
        bursts: how often in a day the load rises suddenly ...
        burst_factor: ... to so many times what it was ...
        burst_s: ... for so many seconds.
    """

    per_s: float
    days: float = 1.0
    new: Lengths = Lengths(median=1020, mean=1155, most=8192)
    chat: Lengths = Lengths(median=129, mean=211, most=2048)
    long: Lengths = Lengths(median=1600, mean=2000, most=8192)
    long_share: float = 0.3
    turns: float = 1.6
    think_s: float = 60.0
    bursts: int = 4
    burst_factor: float = 1.8
    burst_s: float = 600.0


def draw(config: TrafficConfig, seed: int) -> list[Arrival]:
    """Requests of a non-homogeneous Poisson process, in the order in which they come; equal for equal arguments."""
    source = random.Random(seed)
    end_s = config.days * DAY_S
    bursts = sorted(source.uniform(0, max(0.0, end_s - config.burst_s)) for _ in range(round(config.bursts * config.days)))
    found: list[Arrival] = []
    for conversation, at_s in enumerate(_beginnings(config, bursts, end_s, source)):
        found += _turns(config, conversation, at_s, end_s, source)
    found.sort()
    return found


def rate(config: TrafficConfig, at_s: float, bursts: Sequence[float]) -> float:
    """Conversations per second at a time; ``bursts``: when they begin, ascending. The hours' values are joined by lines."""
    hour = at_s / 3600 - 0.5
    here, part = math.floor(hour), hour % 1
    shape = (1 - part) * _HOURS[here % 24] + part * _HOURS[(here + 1) % 24]
    last = bisect_right(bursts, at_s) - 1
    bursting = last >= 0 and at_s < bursts[last] + config.burst_s
    return config.per_s * shape / _MEAN * (config.burst_factor if bursting else 1.0)


_MEAN = math.fsum(_HOURS) / len(_HOURS)


def _beginnings(config: TrafficConfig, bursts: Sequence[float], end_s: float, source: random.Random) -> Iterator[float]:
    """By thinning (Lewis and Shedler 1979)."""
    most = config.per_s * max(_HOURS) / _MEAN * max(1.0, config.burst_factor)
    at_s = 0.0
    while (at_s := at_s + source.expovariate(most)) < end_s:
        if source.random() * most < rate(config, at_s, bursts):
            yield at_s


def _turns(config: TrafficConfig, conversation: int, at_s: float, end_s: float, source: random.Random) -> Iterator[Arrival]:
    """A turn comes at its time, however long the answer before it took: so all fleets get the same requests."""
    context = 0
    while at_s < end_s:
        lengths = config.long if source.random() < config.long_share else config.chat
        prompt, answer = context + config.new.draw(source), lengths.draw(source)
        yield Arrival(at_s, conversation, prompt, answer)
        if source.random() >= 1 - 1 / config.turns:
            return
        context = prompt + answer
        at_s += source.lognormvariate(math.log(config.think_s), 1.0)
