"""Semantic look-up: what followed in the corpus where the target's hidden state was nearest to this one.

The state is the one that the last committed token was chosen from; of its nearest neighbours in the index those count that
chose the same token. No suffix needs to match. (The idea is kNN-LM's, Khandelwal et al., ICLR 2020. There the neighbours
change the distribution; here they only draft.)
"""

from __future__ import annotations

from collections.abc import Sequence

from services.drafter.retrieval import CONTINUATION_LENGTH, CONTINUATIONS, hit_tree
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.tree import prune
from speculation.types import Features, TokenTree

NAME = "semantic"


class Semantic:
    """Source: see the module."""

    def open(self, message: OpenSession) -> SemanticSession:
        """See ``Source``."""
        return SemanticSession()


class SemanticSession:
    """The latest state and the token that was chosen from it. Implements ``Retrieving``."""

    def __init__(self) -> None:
        self._query: RetrievalQuery | None = None
        self._hits: Sequence[Continuation] = ()

    def query(self) -> RetrievalQuery | None:
        """See ``Retrieving``: nothing before the first step."""
        return self._query

    def found(self, hits: Sequence[Continuation]) -> None:
        """See ``Retrieving``."""
        self._hits = hits

    def draft(self, max_nodes: int) -> TokenTree:
        """See ``SourceSession``."""
        return prune(hit_tree(self._hits, NAME), max_nodes, max_nodes)

    def observe(self, report: StepReport) -> None:
        """See ``SourceSession``."""
        self._hits, self._query = (), None
        features = None if report.observation is None else report.observation.features
        if features is not None and report.committed:
            self._query = RetrievalQuery(
                suffix=report.committed[-1:],
                max_continuations=CONTINUATIONS,
                max_length=CONTINUATION_LENGTH,
                state=_last(features),
            )

    def close(self) -> None:
        """See ``SourceSession``: nothing is kept."""


def _last(features: Features) -> Features:
    """The last row."""
    size = len(features.data) // features.rows
    return Features(data=features.data[-size:], rows=1, width=features.width, dtype=features.dtype)
