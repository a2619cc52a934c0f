"""ANPD (Ou et al., NAACL 2024, arXiv 2404.08698): an adaptive n-gram model of the request's own text.

It counts n-grams of all orders from 2 to ``max_order``, token by token. A chain is drafted greedily: each token is the one
that most often followed the longest known suffix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from services.drafter.config import AnpdConfig, DrafterConfig
from services.drafter.sources.interfaces import TreeSource
from speculation.messages import OpenSession, StepReport
from speculation.tree import chain
from speculation.types import TokenTree

NAME = "anpd"

# Claimed probability of each further token; it only ranks nodes against those of other requests.
_EACH = 0.6


def make(config: DrafterConfig) -> Anpd:
    """For ``catalogue.MAKERS``."""
    return Anpd(config.anpd)


class Anpd(TreeSource):
    """The adaptive n-gram model of ANPD's section 3, one for each request."""

    def __init__(self, config: AnpdConfig) -> None:
        self._config = config

    def open(self, message: OpenSession) -> AnpdSession:
        return AnpdSession(self._config, message.tokens)


class AnpdSession:
    """The counts of one request."""

    def __init__(self, config: AnpdConfig, tokens: Sequence[int]) -> None:
        self._longest = config.max_order - 1
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        self._ending: tuple[int, ...] = ()
        self._read(tokens)

    def draft(self, max_nodes: int) -> TokenTree:
        ending = self._ending
        drafted: list[int] = []
        while len(drafted) < max_nodes and (token := self._likeliest(ending)) is not None:
            drafted.append(token)
            ending = (*ending, token)[-self._longest :]
        return chain(drafted, NAME, [_EACH ** (depth + 1) for depth in range(len(drafted))])

    def observe(self, report: StepReport) -> None:
        self._read(report.committed)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _likeliest(self, ending: tuple[int, ...]) -> int | None:
        for length in range(len(ending), 0, -1):
            counts = self._counts.get(ending[-length:])
            if counts is not None:
                return counts.most_common(1)[0][0]
        return None

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for length in range(1, len(self._ending) + 1):
                self._counts.setdefault(self._ending[-length:], Counter())[token] += 1
            self._ending = (*self._ending, token)[-self._longest :]
