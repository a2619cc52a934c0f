"""Suffix decoding: what followed the longest endings of the text, counted (Oliaro et al., SuffixDecoding, 2024).

A trie holds every stretch of at most ``depth`` tokens with the number of times that it occurred: one for the request itself,
one for earlier answers of its tenant. Where the text's ending occurs in a trie, the counts below say what came next, and how
often. Endings of all lengths are followed at once, the likeliest paths first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from services.drafter.config import SuffixConfig
from speculation.messages import OpenSession, StepReport
from speculation.tree import ROOT
from speculation.types import TokenTree

NAME = "suffix"

# How likely the text goes on as it did after an ending of so many tokens: rough, and only used to rank nodes.
_BY_LENGTH = (0.0, 0.25, 0.45, 0.6, 0.7, 0.78, 0.84, 0.88)
_LONG = 0.92
# Even what always came next need not come again.
_CERTAINTY = 0.95


class _Node:
    """A stretch of tokens: how often it occurred, and what came next."""

    __slots__ = ("count", "next")

    def __init__(self) -> None:
        self.count = 0
        self.next: dict[int, _Node] = {}


class _Trie:
    """All stretches of some texts; texts are taken out again, oldest first, when there are too many tokens."""

    def __init__(self, depth: int, max_tokens: int) -> None:
        self.root = _Node()
        self._depth = depth
        self._max_tokens = max_tokens
        self._texts: deque[tuple[int, ...]] = deque()
        self._tokens = 0

    def add(self, text: Sequence[int]) -> None:
        """Count a whole text."""
        text = tuple(text[-self._max_tokens :])
        self._texts.append(text)
        self._tokens += len(text)
        self._count(text, 1)
        while self._tokens > self._max_tokens:
            oldest = self._texts.popleft()
            self._tokens -= len(oldest)
            self._count(oldest, -1)

    def _count(self, text: Sequence[int], by: int) -> None:
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self._depth]:
                child = node.next.get(token)
                if child is None:
                    child = node.next[token] = _Node()
                child.count += by
                if child.count == 0:
                    del node.next[token]
                    break
                node = child


class Suffix:
    """Source: see the module. The tries of tenants are apart."""

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._tries: OrderedDict[str, _Trie] = OrderedDict()

    def open(self, message: OpenSession) -> SuffixSession:
        """See ``Source``."""
        trie = self._tries.get(message.tenant)
        if trie is None:
            trie = self._tries[message.tenant] = _Trie(self._config.depth, self._config.max_cached_tokens)
        self._tries.move_to_end(message.tenant)
        if len(self._tries) > self._config.max_tenants:
            self._tries.popitem(last=False)
        return SuffixSession(self._config, trie, message)


class SuffixSession:
    """One request's own trie, and where the text's endings are in it and in its tenant's."""

    def __init__(self, config: SuffixConfig, shared: _Trie, message: OpenSession) -> None:
        self._config = config
        self._shared = shared
        self._own = _Node()
        # By length of the ending, from 1: where it is. Its own trie holds every ending, if only because it just occurred.
        self._own_ends: list[_Node] = []
        self._shared_ends: list[_Node | None] = []
        self._answer = list(message.tokens[message.prompt_length :])
        for token in message.tokens:
            self._extend(token)

    def draft(self, max_nodes: int) -> TokenTree:
        """See ``SourceSession``."""
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        place: dict[tuple[int, int], int] = {}
        # (minus the path's probability, a number that breaks ties, parent, token, where it is in a trie)
        heap: list[tuple[float, int, int, int, _Node]] = []
        pushed = 0

        def unfold(parent: int, node: _Node, probability: float) -> None:
            nonlocal pushed
            total = sum(child.count for child in node.next.values())
            for token, child in node.next.items():
                pushed += 1
                heapq.heappush(heap, (-probability * child.count / total, pushed, parent, token, child))

        for length, node in self._ends():
            unfold(ROOT, node, _BY_LENGTH[length] if length < len(_BY_LENGTH) else _LONG)
        while heap and len(tokens) < max_nodes:
            negative, _, parent, token, child = heapq.heappop(heap)
            at = place.setdefault((parent, token), len(tokens))
            if at == len(tokens):
                tokens.append(token)
                parents.append(parent)
                scores.append(-negative)
            unfold(at, child, -negative * _CERTAINTY)
        return TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=(NAME,) * len(tokens), scores=tuple(scores))

    def observe(self, report: StepReport) -> None:
        """See ``SourceSession``."""
        for token in report.committed:
            self._extend(token)
        self._answer += report.committed

    def close(self) -> None:
        """See ``SourceSession``: the answer is remembered for the tenant's next requests."""
        if self._config.max_cached_tokens and self._answer:
            self._shared.add(self._answer)
            self._answer = []

    def _ends(self) -> Iterator[tuple[int, _Node]]:
        """The longest endings that anything followed, in either trie, longest first."""
        found = 0
        for length in range(len(self._own_ends), 0, -1):
            for node in (self._own_ends[length - 1], self._shared_ends[length - 1]):
                if node is not None and node.next:
                    yield length, node
                    found += 1
            if found >= self._config.max_endings:
                return

    def _extend(self, token: int) -> None:
        own = [self._own, *self._own_ends[: self._config.depth - 1]]
        self._own_ends = []
        for node in own:
            child = node.next.get(token)
            if child is None:
                child = node.next[token] = _Node()
            child.count += 1
            self._own_ends.append(child)
        shared = [self._shared.root, *self._shared_ends[: self._config.depth - 1]]
        self._shared_ends = [node.next.get(token) if node is not None else None for node in shared]
