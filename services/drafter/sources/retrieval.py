"""Drafts what followed the text's suffix in a corpus (REST, He et al., NAACL 2024; SPECTRA's datastore).

The index looks up the longest suffix that it knows. The continuations found are merged into a tree; the share of them that
go through a node ranks it. REST's own acceptance rule was not lossless when sampling; here the acceptance walk decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.sources.interfaces import TreeSource
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.tree import ROOT, prune
from speculation.types import TokenTree

# Claimed probability that the text goes on as it did in the corpus, by length of the matched suffix.
_BY_LENGTH = (0.0, 0.15, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75)
_LONG = 0.8
# Length of the suffix that is looked up; and number and length of the continuations that are wanted.
QUERIED = 16
_CONTINUATIONS, _CONTINUATION_LENGTH = 64, 10


NAME = "retrieval"


def make(config: DrafterConfig) -> Retrieval:
    """For ``catalogue.MAKERS``."""
    return Retrieval()


class Retrieval(TreeSource):
    """REST's drafts (section 3): a prefix tree of what followed the longest suffix that the index knows."""

    def open(self, message: OpenSession) -> RetrievalSession:
        return RetrievalSession(message)


class HitSession:
    """Drafts what was found for one request's next step, as it is. Subclasses add ``LookingUp.query``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hits: Sequence[Continuation] = ()

    def found(self, hits: Sequence[Continuation]) -> None:
        self._hits = hits

    def draft(self, max_nodes: int) -> TokenTree:
        return prune(hit_tree(self._hits, self._name), max_nodes, max_nodes)

    def observe(self, report: StepReport) -> None:
        self._hits = ()

    def close(self) -> None:
        """Nothing is kept."""


class RetrievalSession(HitSession):
    """Looks up one request's last tokens. Implements ``LookingUp``."""

    def __init__(self, message: OpenSession) -> None:
        super().__init__(NAME)
        self._recent = deque(message.tokens, maxlen=QUERIED)

    def query(self) -> RetrievalQuery:
        return ending(self._recent)

    @override
    def observe(self, report: StepReport) -> None:
        super().observe(report)
        self._recent.extend(report.committed)


def ending(recent: Sequence[int]) -> RetrievalQuery:
    """The query for what followed the longest known suffix of ``recent``."""
    return RetrievalQuery(suffix=tuple(recent), max_continuations=_CONTINUATIONS, max_length=_CONTINUATION_LENGTH)


def hit_tree(hits: Sequence[Continuation], source: str) -> TokenTree:
    """A prefix tree of continuations.

    A node is as likely after its parent as the share of the parent's continuations that go through it, times a factor for
    the length of the match, which the path to the parent makes longer. Its score is the product of these along its path.
    """
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for hit in hits:
        parent = ROOT
        for token in hit.tokens:
            node = place.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                counts.append(0)
            counts[node] += hit.count
            parent = node
    total = max(1, sum(hit.count for hit in hits))
    matched = hits[0].match_length if hits else 0
    scores: list[float] = []
    lengths: list[int] = []
    for parent, count in zip(parents, counts, strict=True):
        length = matched if parent == ROOT else lengths[parent] + 1
        above, whole = (1.0, total) if parent == ROOT else (scores[parent], counts[parent])
        likely = _BY_LENGTH[length] if length < len(_BY_LENGTH) else _LONG
        lengths.append(length)
        scores.append(above * likely * count / whole)
    return TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=(source,) * len(tokens), scores=tuple(scores))
