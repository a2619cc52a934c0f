"""Semantic look-up: drafts what followed in the corpus where the target's hidden state was nearest to the present one.

The query is the hidden state that the last committed token was chosen from. Of its nearest neighbours in the index, only
those that chose the same token count. No suffix needs to match. (The idea is kNN-LM's, Khandelwal et al., ICLR 2020. There
the neighbours change the distribution; here they only draft.)
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.sessions.known_states import row_of
from services.drafter.sources.interfaces import TreeSource
from services.drafter.sources.retrieval import HitSession, ending
from speculation.messages import OpenSession, RetrievalQuery, StepReport

NAME = "semantic"
# What the output layer reads.
_LAYERS = (-1,)


def make(config: DrafterConfig) -> Semantic:
    """For ``catalogue.MAKERS``."""
    return Semantic()


class Semantic(TreeSource):
    """kNN-LM's look-up (section 2) as a source of drafts."""

    def open(self, message: OpenSession) -> SemanticSession:
        return SemanticSession()


class SemanticSession(HitSession):
    """The latest state and the token that was chosen from it. Implements ``LookingUp``."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._query: RetrievalQuery | None = None

    def query(self) -> RetrievalQuery | None:
        """None before the first step."""
        return self._query

    @override
    def observe(self, report: StepReport) -> None:
        super().observe(report)
        features = None if report.observation is None else report.observation.features
        self._query = None
        if features is not None and report.committed:
            state = row_of(features, features.rows - 1, _LAYERS)
            if state is not None:
                # Its position in this text means nothing to the index.
                self._query = replace(ending(report.committed[-1:]), state=replace(state, start=0))
