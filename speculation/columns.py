"""Reports and drafts of many sessions by columns. A column holds one part of all sessions, session after session.

A step brings a report of every request. An object for each report and each of its parts would cost more than drafting does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from speculation.messages import Draft, StepReport
from speculation.records import maker
from speculation.types import EMPTY_TREE, TokenTree

_make_draft, _make_tree = maker(Draft), maker(TokenTree)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReportColumns:
    """What ``StepReport``s say that have no hidden states, no probes, and as many likely ids after each node.

    Attributes:
        read: makes the reports themselves; their sessions may have other names.
        committed, accepted_paths: as many of each report as ``committed_counts`` and ``accepted_counts`` say.
        node_counts: nodes of each observed tree, of which ``tokens`` and ``parents`` are told.
        top_counts: how many likely ids there are after the root and after each node; 0: nothing was observed.

    Arrays have 32 bits (``i``), hashes 64 (``Q``).
    """

    read: Callable[[], list[StepReport]]
    session_ids: Sequence[str]
    committed: array[int]
    committed_counts: array[int]
    lengths: array[int]
    prefix_hashes: array[int]
    accepted_paths: array[int]
    accepted_counts: array[int]
    max_nodes: array[int]
    min_probabilities: array[float]
    node_counts: array[int]
    tokens: array[int]
    parents: array[int]
    top_counts: array[int]
    top_ids: array[int]

    def __len__(self) -> int:
        return len(self.session_ids)

    def alone(self) -> list[StepReport]:
        """The reports, each by itself."""
        return [
            report if report.session_id == name else replace(report, session_id=name)
            for name, report in zip(self.session_ids, self.read(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftColumns:
    """What ``Draft``s of one group say that follow their prefix at once, with a score for each node.

    Attributes:
        left: reports that none of these answers, by their number.
        node_counts: nodes of each tree.
        sources: of each node, its number in ``source_names``.
        drafting_s: of each draft.
    """

    left: Sequence[int]
    session_ids: Sequence[str]
    base_lengths: Sequence[int]
    base_hashes: Sequence[int]
    node_counts: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    sources: Sequence[int]
    source_names: tuple[str, ...]
    scores: Sequence[float]
    drafting_s: float
    group: str

    def __len__(self) -> int:
        return len(self.session_ids)

    def alone(self) -> list[Draft]:
        """The drafts, each by itself."""
        made, first = [], 0
        tokens, parents, scores = tuple(self.tokens), tuple(self.parents), tuple(self.scores)
        sources = tuple([self.source_names[each] for each in self.sources])
        for name, length, base, count in zip(
            self.session_ids, self.base_lengths, self.base_hashes, self.node_counts, strict=True
        ):
            nodes = slice(first, first + count)
            tree = EMPTY_TREE
            if count:
                tree = _make_tree(tokens=tokens[nodes], parents=parents[nodes], sources=sources[nodes], scores=scores[nodes])
            made.append(
                _make_draft(
                    session_id=name,
                    base_length=length,
                    base_hash=base,
                    tree=tree,
                    group=self.group,
                    drafting_s=self.drafting_s,
                )
            )
            first += count
        return made
