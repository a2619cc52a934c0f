"""Prompt lookup: drafts what followed earlier occurrences of the last few tokens (Saxena, "Prompt lookup decoding", 2023).

Occurrences of the longest n-gram come first, and of one n-gram the latest; further ones become branches of the tree. An
index from n-grams to positions is updated with every token, so a draft costs a few look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.drafter.config import DrafterConfig, PromptLookupConfig
from services.drafter.sources.interfaces import TreeSource
from speculation.messages import OpenSession, StepReport
from speculation.tree import chain, merge, prune
from speculation.types import TokenTree

NAME = "prompt_lookup"

# Claimed probability of the next token of a match, by the length of the match: rough, it only ranks nodes.
_CONFIDENCE = {1: 0.35, 2: 0.6, 3: 0.75}
_LONG_MATCH = 0.85
# Factor for each further occurrence.
_BRANCH_DISCOUNT = 0.6


def make(config: DrafterConfig) -> PromptLookup:
    """For ``catalogue.MAKERS``."""
    return PromptLookup(config.prompt_lookup)


class PromptLookup(TreeSource):
    """Prompt lookup decoding (Saxena, 2023), with branches, and with look-ups in the answer as well as the prompt."""

    def __init__(self, config: PromptLookupConfig) -> None:
        self._config = config

    def open(self, message: OpenSession) -> PromptLookupSession:
        return PromptLookupSession(self._config, message.tokens)


class PromptLookupSession:
    """The n-gram index of one request.

    The text ends with 1 2, which has occurred twice before: at first 3 4 followed, later 5 6. The draft's four nodes are the
    likeliest of both continuations, and the later one is believed more:

    >>> session = PromptLookupSession(PromptLookupConfig(prompt_lookup_max=2), [1, 2, 3, 4, 1, 2, 5, 6, 1, 2])
    >>> draft = session.draft(4)
    >>> draft.tokens, draft.parents
    ((5, 6, 1, 3), (-1, 0, 1, -1))
    >>> [round(score, 2) for score in draft.scores]
    [0.6, 0.36, 0.22, 0.36]
    """

    def __init__(self, config: PromptLookupConfig, tokens: Sequence[int]) -> None:
        self._config = config
        self._tokens: list[int] = []
        # n-gram -> positions right after its occurrences, earliest first.
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._extend(tokens)

    def draft(self, max_nodes: int) -> TokenTree:
        if max_nodes == 0:
            return TokenTree()
        branches = []
        for rank, (start, length) in enumerate(self._matches()):
            continuation = self._tokens[start : start + max_nodes]
            confidence = _CONFIDENCE.get(length, _LONG_MATCH)
            first = confidence * _BRANCH_DISCOUNT**rank
            scores = [first * confidence**depth for depth in range(len(continuation))]
            branches.append(chain(continuation, NAME, scores))
        return prune(merge(branches), max_nodes, max_nodes)

    def observe(self, report: StepReport) -> None:
        self._extend(report.committed)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _matches(self) -> list[tuple[int, int]]:
        """(position of the continuation, length of the n-gram that matched), best first."""
        found: dict[int, int] = {}
        for length in range(self._config.prompt_lookup_max, self._config.prompt_lookup_min - 1, -1):
            for start in reversed(self._followers.get(tuple(self._tokens[-length:]), ())):
                # The last occurrence is the end of the text, which nothing follows yet.
                if start < len(self._tokens):
                    found.setdefault(start, length)
                if len(found) == self._config.max_branches:
                    return list(found.items())
        return list(found.items())

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for length in range(self._config.prompt_lookup_min, min(self._config.prompt_lookup_max, end) + 1):
                self._followers.setdefault(tuple(self._tokens[end - length :]), []).append(end)
