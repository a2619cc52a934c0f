"""What one key uses at present, and whether its limits leave room for more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.access.key_records import KeyRecord
from services.metrics.registry import CounterHandle
from speculation.errors import InvalidArgument, ResourceExhausted


class KeyUse:
    """Counts a key's running requests, and what it has left of its rates.

    Args:
        clock: seconds, never going back.
        limited: counts refusals, by limit.
    """

    def __init__(self, record: KeyRecord, clock: Callable[[], float], limited: CounterHandle) -> None:
        self._record = record
        self._clock = clock
        self._limited = limited
        self._running = 0
        self._arriving = 0
        self._buckets: dict[str, TokenBucket] = {}
        self.follow(record)

    def follow(self, record: KeyRecord) -> None:
        """Take over the record's limits, which may have changed."""
        self._record = record
        for name, per_minute in (("requests", record.requests_per_minute), ("tokens", record.tokens_per_minute)):
            if per_minute is None:
                self._buckets.pop(name, None)
            elif name in self._buckets:
                self._buckets[name].resize(per_minute)
            else:
                self._buckets[name] = TokenBucket(per_minute, self._clock)

    def enter(self, requests: int, tokens: int, *, counted_as: str) -> None:
        """Take slots for so many requests, and charge them and their tokens.

        Args:
            counted_as: the field that says how many they are.

        Raises:
            InvalidArgument: the limits can never allow so many at once.
            ResourceExhausted: a limit is reached; says when to try again.
        """
        record = self._record
        for name in ("max_concurrent", "requests_per_minute"):
            most = getattr(record, name)
            if most is not None and requests > most:
                allowed = f"such that there are at most {most} answers in all: this API key's {name}"
                raise InvalidArgument(counted_as, f"for {requests} answers", allowed)
        if record.max_concurrent is not None and self._running + requests > record.max_concurrent:
            self._limited.add(1, "max_concurrent")
            raise ResourceExhausted(
                f"{self._running} requests of this API key run already (max_concurrent is {record.max_concurrent})"
            )
        self._wait("requests", requests)
        self.charge(tokens)
        self._settle("requests", requests)
        self._running += requests

    def charge(self, tokens: int) -> None:
        """Take tokens from the rate.

        Raises:
            ResourceExhausted: there are not so many; says when to try again.
        """
        self._wait("tokens", tokens)
        self._settle("tokens", tokens)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A request, while its content arrives: nobody waits for more of it than could be answered.

        Raises:
            ResourceExhausted: as many arrive already as may run at once.
        """
        most = self._record.max_concurrent
        if most is not None and self._arriving >= most:
            self._limited.add(1, "max_concurrent")
            raise ResourceExhausted(f"{self._arriving} requests of this API key arrive already (max_concurrent is {most})")
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def leave(self) -> None:
        """Give a slot back."""
        self._running -= 1

    def give_back(self, tokens: int) -> None:
        """Give charged tokens back; negative: take what was used beyond the charge."""
        self._settle("tokens", -tokens)

    def rates(self) -> dict[str, str]:
        """What is left, as headers that OpenAI's clients read."""
        told = {}
        for name, bucket in self._buckets.items():
            told[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            told[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            told[f"x-ratelimit-reset-{name}"] = f"{bucket.full_in_s:.3f}s"
        return told

    def _wait(self, name: str, units: float) -> None:
        if name in self._buckets and (wait_s := self._buckets[name].wait_s(units)) > 0:
            self._limited.add(1, f"{name}_per_minute")
            limit = f"{self._buckets[name].per_minute} {name} per minute"
            raise ResourceExhausted(f"this API key's limit of {limit} is reached; try again in {wait_s:.1f} s", wait_s)

    def _settle(self, name: str, units: float) -> None:
        if name in self._buckets:
            self._buckets[name].settle(units)


class TokenBucket:
    """Lets ``per_minute`` units pass per minute on average, and at most so many at once.

    By hand: limiters on PyPI cannot owe what is known only afterwards, as an answer's tokens.

    What is known only afterwards may be taken without asking (``settle``), so that the bucket can owe.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def resize(self, per_minute: int) -> None:
        """Change the rate; what has been taken stays taken."""
        if per_minute != self.per_minute:
            self._level += per_minute - self.per_minute
            self.per_minute = per_minute

    @property
    def level(self) -> float:
        """Units at hand; negative: owed."""
        now = self._clock()
        refilled = self._level + max(0.0, now - self._at) * self.per_minute / 60
        self._level, self._at = min(float(self.per_minute), refilled), now
        return self._level

    def wait_s(self, units: float) -> float:
        """Seconds until ``units`` can be taken; 0: now. They must not be more than ``per_minute``."""
        return max(0.0, (units - self.level) * 60 / self.per_minute)

    @property
    def full_in_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(self.per_minute)

    def settle(self, units: float) -> None:
        """Take ``units``, or give back negative ones."""
        self._level = min(float(self.per_minute), self.level - units)
