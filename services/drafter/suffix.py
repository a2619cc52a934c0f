"""Suffix decoding: what followed the longest endings of the text, counted (Oliaro et al., SuffixDecoding, 2024).

A trie holds every stretch of at most ``depth`` tokens with the number of times that it occurred: one for the request itself,
one for earlier answers of its tenant. Where the text's ending occurs in a trie, the counts below say what came next, and how
often. The longest ending that anything followed is asked first, then shorter ones.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.drafter import trie
from services.drafter.config import DrafterConfig, SuffixConfig
from services.drafter.trie import Node, Stretch
from speculation.messages import OpenSession, StepReport

NAME = "suffix"

# Kinds of candidates: whose trie, how long the ending is, how often it was followed by this token, in which share of cases.
_TRIES = ("own", "shared")
_LENGTHS = (1, 2, 3, 4, 6, 9, 13)
_COUNTS = (1, 2, 4)
_SHARES = (0.0, 0.2, 0.4, 0.7, 0.95)
# What is believed of them at first (measured on a small chat model).
_BY_LENGTH = (0.33, 0.5, 0.67, 0.72, 0.8, 0.85, 0.9)
_BY_SHARE = (0.07, 0.25, 0.35, 0.65, 1.0)
# Followers of one ending that are considered.
_MOST_FOLLOWERS = 4


def _kind(trie: str, length: int, count: int, share: int) -> str:
    return f"{trie}:{_LENGTHS[length]}:{_COUNTS[count]}:{_SHARES[share]}"


_KINDS = [
    [[[_kind(t, x, c, s) for s in range(len(_SHARES))] for c in range(len(_COUNTS))] for x in range(len(_LENGTHS))]
    for t in _TRIES
]
PRIOR = {
    _kind(t, x, c, s): _BY_LENGTH[x] * _BY_SHARE[s]
    for t in _TRIES
    for x in range(len(_LENGTHS))
    for c in range(len(_COUNTS))
    for s in range(len(_SHARES))
}


class _Answers:
    """All stretches of some texts; texts are taken out again, oldest first, when they are too many tokens or too old."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self.root = Node()
        self._config = config
        self._clock = clock
        self._texts: deque[tuple[float, tuple[int, ...]]] = deque()
        self._tokens = 0

    def add(self, text: Sequence[int]) -> None:
        """Count a whole text."""
        kept = tuple(text[-self._config.max_cached_tokens :])
        self._texts.append((self._clock(), kept))
        self._tokens += len(kept)
        trie.add(self.root, kept, self._config.depth)
        self.tidy()

    def tidy(self) -> None:
        """Forget what is too much or too old."""
        oldest_allowed = self._clock() - self._config.cached_s
        while self._texts and (self._tokens > self._config.max_cached_tokens or self._texts[0][0] < oldest_allowed):
            _, oldest = self._texts.popleft()
            self._tokens -= len(oldest)
            trie.remove(self.root, oldest, self._config.depth)


def make(config: DrafterConfig) -> Suffix:
    """For ``SourceSpec.made_by``."""
    return Suffix(config.suffix)


class Suffix:
    """Source: see the module. The tries of tenants are apart."""

    prior = PRIOR

    def __init__(self, config: SuffixConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._answers: OrderedDict[str, _Answers] = OrderedDict()

    def open(self, message: OpenSession) -> SuffixSession:
        """See ``WalkedSource``."""
        answers = self._answers.get(message.tenant)
        if answers is None:
            answers = self._answers[message.tenant] = _Answers(self._config, self._clock)
        self._answers.move_to_end(message.tenant)
        if len(self._answers) > self._config.max_tenants:
            self._answers.popitem(last=False)
        for each in self._answers.values():
            each.tidy()
        return SuffixSession(self._config, answers, message)

    def forget(self, tenant: str) -> None:
        """See ``WalkedSource``."""
        self._answers.pop(tenant, None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the endings of the text are, by length from 1, in the request's own trie and in its tenant's."""

    own: Sequence[Stretch]
    shared: Sequence[Stretch]


class SuffixSession:
    """One request's own trie, and where the text's endings are in it and in its tenant's."""

    def __init__(self, config: SuffixConfig, shared: _Answers, message: OpenSession) -> None:
        self._config = config
        self._shared = shared
        self._own = Node()
        self._text: list[int] = []
        # Of the text's own endings those that occurred before: nothing followed the others yet.
        self._repeated: list[Node] = []
        self._place = Place((), ())
        self._answer = list(message.tokens[message.prompt_length :])
        for token in message.tokens:
            self._extend(token)

    def start(self) -> Place:
        """See ``PathSource``."""
        return self._place

    def follow(self, place: Place, token: int) -> Place | None:
        """See ``PathSource``."""
        own = self._ends(self._own, place.own, token)
        shared = self._ends(self._shared.root, place.shared, token)
        return Place(own, shared) if own or shared else None

    def candidates(self, place: Place) -> Iterator[tuple[int, str]]:
        """See ``PathSource``."""
        seen: set[int] = set()
        found = 0
        # Nothing is counted behind the longest stretch.
        longest = min(max(len(place.own), len(place.shared)), self._config.depth - 1)
        for length in range(longest, 0, -1):
            size = bisect_right(_LENGTHS, length) - 1
            for whose, ends in enumerate((place.own, place.shared)):
                likeliest = trie.followers(ends[length - 1], _MOST_FOLLOWERS) if length <= len(ends) else ()
                found += bool(likeliest)
                for token, count, total in likeliest:
                    if token not in seen:
                        seen.add(token)
                        share = bisect_right(_SHARES, count / total) - 1
                        yield token, _KINDS[whose][size][bisect_right(_COUNTS, count) - 1][share]
            if found >= self._config.max_endings:
                return

    def observe(self, report: StepReport) -> None:
        """See ``PathSource``."""
        for token in report.committed:
            self._extend(token)
        self._answer += report.committed

    def close(self) -> None:
        """See ``PathSource``: the answer is remembered for the tenant's next requests, where that is asked for."""
        if self._config.max_cached_tokens and self._answer:
            self._shared.add(self._answer)
            self._answer = []

    def _ends(self, root: Node, ends: Sequence[Stretch], token: int) -> list[Stretch]:
        found: list[Stretch] = []
        for stretch in (root, *ends[: self._config.depth - 1]):
            longer = trie.follow(stretch, token)
            # Where an ending does not occur, no longer one does.
            if longer is None:
                break
            found.append(longer)
        return found

    def _extend(self, token: int) -> None:
        shared = self._ends(self._shared.root, self._place.shared, token)
        self._text.append(token)
        end, depth = len(self._text), self._config.depth
        repeated: list[Node] = []
        for length, node in enumerate((self._own, *self._repeated[: depth - 1]), 1):
            child = node.next.get(token)
            if child is None:
                node.next[token] = (self._text, end)
            else:
                repeated.append(trie.again(node, token, child, deepest=length == depth))
        self._repeated = repeated
        self._place = Place(repeated, shared)
