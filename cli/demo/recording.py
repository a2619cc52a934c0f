"""An answer as it came: which token when, and who guessed it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import outrider
from speculation.errors import OutriderError

PLAIN, OURS = "autoregressive", "auto"
_MEANWHILE_AFTER = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """An answer.

    Attributes:
        arrivals: seconds from sending the request to each chunk, and how many tokens had come by then.
    """

    result: outrider.Generation
    arrivals: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """From sending the request to the last token."""
        return self.arrivals[-1][0]

    @property
    def longest_gap(self) -> float:
        """Seconds between two chunks, at most."""
        return max(after - before for (before, _), (after, _) in pairwise(self.arrivals))

    @property
    def passes(self) -> int:
        """Passes of the target that the answer took."""
        return self.result.speculative_decoding.num_spec_steps

    def at(self, seconds: float) -> tuple[int, int]:
        """How many tokens had come by then, and in how many passes."""
        come = [tokens for arrived, tokens in self.arrivals if arrived <= seconds]
        return (come[-1], len(come)) if come else (0, 0)

    def spans(self, tokens: int) -> Iterator[tuple[str, str]]:
        """The text of the first ``tokens`` tokens, each with who guessed it."""
        at = 0
        for origin in self.result.origins[:tokens]:
            yield self.result.text[at : at + origin.text_length], origin.source
            at += origin.text_length


def record(
    client: outrider.Client, strategy: str, message: str, max_tokens: int, meanwhile: Callable[[], object] | None = None
) -> Recording:
    """Ask for the one greedy answer, and note when each chunk comes.

    Nothing that the server remembers of earlier answers is used, nor is this one remembered.

    Args:
        meanwhile: called in a thread of its own, once ``_MEANWHILE_AFTER`` tokens have come.

    Raises:
        OutriderError: the stream ends without a result.
    """
    began, arrivals, tokens = time.perf_counter(), [], 0
    with client.stream(
        messages=[{"role": "user", "content": message}],
        strategy=cast("outrider.Strategy", strategy),
        max_tokens=max_tokens,
        temperature=0,
        report="sources",
        cache_salt=secrets.token_hex(8),
    ) as stream:
        for chunk in stream:
            if chunk.token_ids:
                tokens += len(chunk.token_ids)
                arrivals.append((time.perf_counter() - began, tokens))
            if meanwhile is not None and tokens >= _MEANWHILE_AFTER:
                threading.Thread(target=meanwhile).start()
                meanwhile = None
    if stream.result is None:
        raise OutriderError("the server ended the stream without a result")
    return Recording(result=stream.result, arrivals=tuple(arrivals))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The same request, answered plainly and with drafts by turns, once each to warm up and then a few times."""

    plain: tuple[Recording, ...]
    ours: tuple[Recording, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Plain decoding's seconds over ours, pair by pair."""
        return tuple(plain.seconds / ours.seconds for plain, ours in zip(self.plain, self.ours, strict=True))

    @property
    def differ(self) -> int:
        """Tokens of our answers that are not plain decoding's."""
        reference = self.plain[0].result.token_ids
        return sum(differing(reference, each.result.token_ids) for each in (*self.plain, *self.ours))


def measure(client: outrider.Client, message: str, max_tokens: int, pairs: int) -> Pairs:
    """Answer by turns."""
    plain, ours = [], []
    for _ in range(1 + pairs):
        plain.append(record(client, PLAIN, message, max_tokens))
        ours.append(record(client, OURS, message, max_tokens))
    return Pairs(plain=tuple(plain[1:]), ours=tuple(ours[1:]))


def differing(reference: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """At how many places two answers differ; where one has ended, too."""
    return sum(a != b for a, b in zip(reference, tokens, strict=False)) + abs(len(reference) - len(tokens))
