"""Semantic look-up: what followed in the corpus where the target's hidden state was nearest to this one.

The state is the one that the last committed token was chosen from; of its nearest neighbours in the index those count that
chose the same token. No suffix needs to match. (The idea is kNN-LM's, Khandelwal et al., ICLR 2020. There the neighbours
change the distribution; here they only draft.)
"""

from __future__ import annotations

from dataclasses import replace

from services.drafter.retrieval import HitSession, ending
from speculation.messages import OpenSession, RetrievalQuery, StepReport
from speculation.types import Features

NAME = "semantic"


class Semantic:
    """Source: see the module."""

    def open(self, message: OpenSession) -> SemanticSession:
        """See ``Source``."""
        return SemanticSession()


class SemanticSession(HitSession):
    """The latest state and the token that was chosen from it. Implements ``Retrieving``."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._query: RetrievalQuery | None = None

    def query(self) -> RetrievalQuery | None:
        """See ``Retrieving``: nothing before the first step."""
        return self._query

    def observe(self, report: StepReport) -> None:
        """See ``SourceSession``."""
        super().observe(report)
        features = None if report.observation is None else report.observation.features
        self._query = None
        if features is not None and report.committed:
            self._query = replace(ending(report.committed[-1:]), state=_last(features))


def _last(features: Features) -> Features:
    """The last row."""
    size = len(features.data) // features.rows
    return Features(data=features.data[-size:], rows=1, width=features.width, dtype=features.dtype)
