"""Reports and drafts of many sessions by columns. A column holds one part of all sessions, session after session.

A step brings a report of every request. An object for each report and each of its parts would cost more than drafting does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from speculation.messages import Draft, StepReport
from speculation.records import maker
from speculation.types import EMPTY_TREE, Observation, TokenTree

_make_draft, _make_tree = maker(Draft), maker(TokenTree)
_make_report, _make_observation = maker(StepReport), maker(Observation)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SentReports:
    """``StepReport``s without hidden states and probes: an entry for each in every column.

    Attributes:
        trees, top_ids: what was observed; ``EMPTY_TREE`` and nothing where nothing was.
    """

    session_ids: Sequence[str]
    committed: Sequence[tuple[int, ...]]
    lengths: Sequence[int]
    prefix_hashes: Sequence[int]
    accepted_paths: Sequence[tuple[int, ...]]
    max_nodes: Sequence[int]
    min_probabilities: Sequence[float]
    trees: Sequence[TokenTree]
    top_ids: Sequence[Sequence[tuple[int, ...]]]

    def __len__(self) -> int:
        return len(self.session_ids)

    @classmethod
    def of(cls, reports: Sequence[StepReport]) -> Self:
        """Those of ``reports``."""
        seen = [each.observation for each in reports]
        return cls(
            session_ids=[each.session_id for each in reports],
            committed=[each.committed for each in reports],
            lengths=[each.length for each in reports],
            prefix_hashes=[each.prefix_hash for each in reports],
            accepted_paths=[each.accepted_path for each in reports],
            max_nodes=[each.max_nodes for each in reports],
            min_probabilities=[each.min_probability for each in reports],
            trees=[EMPTY_TREE if each is None else each.tree for each in seen],
            top_ids=[() if each is None else each.top_ids for each in seen],
        )

    def alone(self) -> list[StepReport]:
        """The reports, each by itself."""
        columns = zip(
            self.session_ids,
            self.committed,
            self.lengths,
            self.prefix_hashes,
            self.accepted_paths,
            self.max_nodes,
            self.min_probabilities,
            self.trees,
            self.top_ids,
            strict=True,
        )
        return [
            _make_report(
                session_id=session_id,
                committed=committed,
                length=length,
                prefix_hash=prefix_hash,
                accepted_path=path,
                max_nodes=max_nodes,
                min_probability=least,
                observation=_make_observation(tree=tree, top_ids=ids) if ids else None,
            )
            for session_id, committed, length, prefix_hash, path, max_nodes, least, tree, ids in columns
        ]


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
