"""Step reports and drafts of several sessions, each in one message by columns (drafting.proto).

A message of its own for every session costs more than all that is in it: a step has as many reports as requests. What is
rare in them, as hidden states or sampled drafts, has no column; such ones travel alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeVar

from outrider.internal.v1 import drafting_pb2, tree_pb2
from services.links.codec.trees import check_size
from speculation import limits
from speculation.columns import DraftColumns, ReportColumns, SentReports
from speculation.errors import InvalidArgument, MalformedTree
from speculation.messages import Draft, DraftFailure, StepReport
from speculation.records import maker
from speculation.types import EMPTY_TREE, Observation, TokenTree

_T = TypeVar("_T")
_make_report, _make_observation = maker(StepReport), maker(Observation)
_make_draft, _make_tree = maker(Draft), maker(TokenTree)

# Most numbers of reports and of drafts in one message: with room to spare below ``MAX_DRAFT_MESSAGE_BYTES``.
MOST_NUMBERS = 1 << 18


def numbers_of_report(report: StepReport) -> int | None:
    """About how many numbers a report brings into the columns; None: they have no room for all of it."""
    seen, size = report.observation, len(report.committed) + len(report.accepted_path) + 5
    if seen is None:
        return size
    tree, ids = seen.tree, seen.top_ids
    if seen.features is not None or seen.probe_ids or tree.probes or tree.proposals or len(ids) != 1 + len(tree.tokens):
        return None
    top = len(ids[0])
    # Without a set: each request has a report in each step.
    for row in ids:
        if len(row) != top:
            return None
    return size + (4 + top) * len(ids) if top else None


def numbers_of_draft(draft: Draft) -> int | None:
    """As ``numbers_of_report``, of a draft."""
    rare = draft.assumed or draft.more or draft.unready or draft.tree.probes or draft.tree.proposals
    return None if rare else numbers_of_nodes(len(draft.tree.tokens))


def numbers_of_nodes(nodes: int) -> int:
    """About how many numbers a draft of so many nodes brings into the columns."""
    return 4 * nodes + 5


def numbers_of_sent(reports: SentReports) -> int | None:
    """As ``numbers_of_report``, of all of them."""
    rows = [len(ids) for ids in reports.top_ids]
    if any(seen and seen != 1 + len(tree.tokens) for seen, tree in zip(rows, reports.trees, strict=True)):
        return None
    likely = set(map(len, _joined(reports.top_ids)))
    # Those of one request may differ from those of another.
    if 0 in likely or (len(likely) > 1 and any(len(set(map(len, ids))) > 1 for ids in reports.top_ids)):
        return None
    size = sum(map(len, reports.committed)) + sum(map(len, reports.accepted_paths)) + 5 * len(reports)
    return size + (4 + max(likely, default=0)) * sum(rows)


def write_reports(reports: SentReports, made: drafting_pb2.StepReports) -> None:
    """Encode reports, all with room in the columns, into an empty message."""
    made.session_ids.extend(reports.session_ids)
    made.committed.extend(_joined(reports.committed))
    made.committed_counts.extend(map(len, reports.committed))
    made.lengths.extend(reports.lengths)
    made.prefix_hashes.extend(reports.prefix_hashes)
    made.accepted_paths.extend(_joined(reports.accepted_paths))
    made.accepted_counts.extend(map(len, reports.accepted_paths))
    made.max_nodes.extend(reports.max_nodes)
    made.min_probabilities.extend(reports.min_probabilities)
    _write_trees(reports.trees, made.trees)
    made.top_ids.extend(_joined(_joined(reports.top_ids)))
    made.top_counts.extend([len(rows[0]) if rows else 0 for rows in reports.top_ids])


def read_reports(wire: drafting_pb2.StepReports) -> list[StepReport]:
    """The reports of a message.

    Raises:
        InvalidArgument: its columns do not fit together, or a report breaks a limit.
    """
    counts, nodes, tops = wire.committed_counts[:], wire.max_nodes[:], wire.top_counts[:]
    check_size("steps.committed", max(counts, default=0), limits.MAX_TREE_NODES + 1)
    check_size("steps.max_nodes", max(nodes, default=0), limits.MAX_TREE_NODES)
    trees = [_tree(*each) for each in _trees("steps.trees", wire.trees)]
    names, lengths, hashes, least = wire.session_ids[:], wire.lengths[:], wire.prefix_hashes[:], wire.min_probabilities[:]
    _check_columns("steps", names, counts, lengths, hashes, wire.accepted_counts, nodes, least, trees, tops)
    sizes = [top * (1 + len(tree.tokens)) for top, tree in zip(tops, trees, strict=True)]
    columns = zip(
        names,
        _cut("steps.committed", wire.committed, counts),
        lengths,
        hashes,
        _cut("steps.accepted_paths", wire.accepted_paths, wire.accepted_counts),
        nodes,
        least,
        map(_observation, trees, tops, _cut("steps.top_ids", wire.top_ids, sizes)),
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
            observation=observation,
        )
        for session_id, committed, length, prefix_hash, path, max_nodes, least, observation in columns
    ]


def read_report_columns(wire: drafting_pb2.StepReports) -> ReportColumns | None:
    """The reports of a message as columns; None where ``read_reports`` refuses one, or a number is too large."""
    trees = wire.trees
    try:
        held = [array("i", column[:]) for column in _numbers_of(wire)]
    except OverflowError:
        return None
    committed, committed_counts, lengths, paths, path_counts, nodes, counts, tokens, parents, tops, ids = held
    each = (committed_counts, lengths, path_counts, nodes, counts, tops, wire.prefix_hashes, wire.min_probabilities)
    rows = sum([top * (1 + count) for top, count in zip(tops, counts, strict=False)])
    parts = (
        (sum(committed_counts), committed), (sum(path_counts), paths), (sum(counts), tokens), (sum(counts), parents),
        (sum(counts), trees.sources), (sum(trees.score_counts), trees.scores), (rows, ids),
    )  # fmt: skip
    count = len(wire.session_ids)
    fits = all(len(column) == count for column in each) and all(size == len(column) for size, column in parts)
    small = max(committed_counts, default=0) <= limits.MAX_TREE_NODES + 1 and max(nodes, default=0) <= limits.MAX_TREE_NODES
    if not (fits and small and len(trees.score_counts) == count and _names(trees).sound):
        return None
    return ReportColumns(
        read=partial(read_reports, wire),
        session_ids=wire.session_ids[:],
        committed=committed,
        committed_counts=committed_counts,
        lengths=lengths,
        prefix_hashes=array("Q", wire.prefix_hashes[:]),
        accepted_paths=paths,
        accepted_counts=path_counts,
        max_nodes=nodes,
        min_probabilities=array("d", wire.min_probabilities[:]),
        node_counts=counts,
        tokens=tokens,
        parents=parents,
        top_counts=tops,
        top_ids=ids,
    )


def _numbers_of(wire: drafting_pb2.StepReports) -> tuple[Sequence[int], ...]:
    trees = wire.trees
    return (
        wire.committed,
        wire.committed_counts,
        wire.lengths,
        wire.accepted_paths,
        wire.accepted_counts,
        wire.max_nodes,
        trees.counts,
        trees.tokens,
        trees.parents,
        wire.top_counts,
        wire.top_ids,
    )


def _observation(tree: TokenTree, top: int, ids: tuple[int, ...]) -> Observation | None:
    if not top:
        return None
    return _make_observation(tree=tree, top_ids=tuple([ids[at : at + top] for at in range(0, len(ids), top)]))


def write_drafts(drafts: Sequence[Draft], made: drafting_pb2.Drafts) -> None:
    """Encode drafts, all with room in the columns, into an empty message."""
    made.session_ids.extend([each.session_id for each in drafts])
    made.base_lengths.extend([each.base_length for each in drafts])
    made.base_hashes.extend([each.base_hash for each in drafts])
    _write_trees([each.tree for each in drafts], made.trees)
    made.drafting_s.extend([each.drafting_s for each in drafts])
    made.groups.extend([each.group for each in drafts])


def write_draft_columns(drafts: DraftColumns, made: drafting_pb2.Drafts) -> None:
    """As ``write_drafts``, of drafts that are columns already."""
    count = len(drafts)
    made.session_ids.extend(drafts.session_ids)
    made.base_lengths.extend(drafts.base_lengths)
    made.base_hashes.extend(drafts.base_hashes)
    made.drafting_s.extend([drafts.drafting_s] * count)
    made.groups.extend([drafts.group] * count)
    trees = made.trees
    trees.counts.extend(drafts.node_counts)
    trees.tokens.extend(drafts.tokens)
    trees.parents.extend(drafts.parents)
    trees.sources.extend(drafts.sources)
    trees.source_names.extend(drafts.source_names)
    trees.scores.extend(drafts.scores)
    trees.score_counts.extend(drafts.node_counts)


def read_draft_columns(wire: drafting_pb2.Drafts) -> DraftColumns | None:
    """The drafts of a message as columns; None where their groups or times differ, scores lack, or one breaks a limit."""
    trees, count = wire.trees, len(wire.session_ids)
    counts, took_s, groups = trees.counts[:], wire.drafting_s[:], wire.groups[:]
    each, of_nodes = (
        (wire.base_lengths, wire.base_hashes, counts, took_s, groups),
        (trees.parents, trees.sources, trees.scores),
    )
    nodes = sum(counts)
    fits = all(len(column) == count for column in each) and all(len(column) == nodes for column in (trees.tokens, *of_nodes))
    alike = trees.score_counts[:] == counts and len(set(groups)) == 1 == len(set(took_s))
    few = count <= limits.MAX_DRAFTS
    if not (fits and alike and few and len(groups[0]) <= limits.MAX_SOURCE_NAME and 0 <= took_s[0] < float("inf")):
        return None
    names = _names(trees)
    if not names.sound:
        return None
    return DraftColumns(
        left=(),
        session_ids=wire.session_ids[:],
        base_lengths=wire.base_lengths[:],
        base_hashes=wire.base_hashes[:],
        node_counts=counts,
        tokens=trees.tokens[:],
        parents=trees.parents[:],
        sources=trees.sources[:],
        source_names=names.all,
        scores=trees.scores[:],
        drafting_s=took_s[0],
        group=groups[0],
    )


def read_drafts(wire: drafting_pb2.Drafts) -> list[Draft | DraftFailure]:
    """The drafts of a message. One that breaks a limit becomes a failure of its session only.

    Raises:
        InvalidArgument: its columns do not fit together, or it has too many.
    """
    check_size("drafts", len(wire.session_ids), limits.MAX_DRAFTS)
    trees = _trees("drafts.trees", wire.trees)
    names, lengths, hashes, took_s = wire.session_ids[:], wire.base_lengths[:], wire.base_hashes[:], wire.drafting_s[:]
    _check_columns("drafts", names, lengths, hashes, trees, took_s, wire.groups)
    return [_draft(*each) for each in zip(names, lengths, hashes, trees, took_s, wire.groups[:], strict=True)]


def _draft(
    session_id: str, base_length: int, base_hash: int, nodes: _Nodes, drafting_s: float, group: str
) -> Draft | DraftFailure:
    try:
        check_size("draft.group", len(group), limits.MAX_SOURCE_NAME)
        tree = _tree(*nodes)
    except InvalidArgument as error:
        return DraftFailure(session_id=session_id, reason=f"malformed draft: {error}")
    # Only a statistic: an invalid value is no reason to drop the draft.
    took_s = drafting_s if 0 <= drafting_s < float("inf") else 0.0
    return _make_draft(
        session_id=session_id, base_length=base_length, base_hash=base_hash, tree=tree, drafting_s=took_s, group=group
    )


class _Names(NamedTuple):
    """The names of all sources of a message, the longest of them, and whether no tree of the message breaks a limit."""

    all: tuple[str, ...]
    longest: int
    sound: bool


# A tree's tokens, parents, indices of sources and scores, and the names of all sources.
_Nodes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[float, ...], _Names]


def _write_trees(trees: Sequence[TokenTree], made: tree_pb2.TokenTrees) -> None:
    sources = [*_joined([tree.sources for tree in trees])]
    number = {name: at for at, name in enumerate(dict.fromkeys(sources))}
    made.counts.extend([len(tree.tokens) for tree in trees])
    made.tokens.extend(_joined([tree.tokens for tree in trees]))
    made.parents.extend(_joined([tree.parents for tree in trees]))
    made.sources.extend(map(number.__getitem__, sources))
    made.source_names.extend(number)
    made.scores.extend(_joined([tree.scores for tree in trees]))
    made.score_counts.extend([len(tree.scores) for tree in trees])


def _names(wire: tree_pb2.TokenTrees) -> _Names:
    told = tuple(wire.source_names[:])
    longest = max(map(len, told), default=0)
    most, last = max((*wire.counts[:], *wire.score_counts[:]), default=0), max(wire.sources[:], default=-1)
    many = len(told) <= limits.MAX_SOURCES * len(wire.counts)
    few = many and longest <= limits.MAX_SOURCE_NAME
    return _Names(told, longest, most <= limits.MAX_TREE_NODES and last < len(told) and few)


def _trees(name: str, wire: tree_pb2.TokenTrees) -> list[_Nodes]:
    counts, names = wire.counts[:], _names(wire)
    check_size(f"{name}.source_names", len(names.all), limits.MAX_SOURCES * len(counts))
    return [
        (*columns, names)
        for columns in zip(
            _cut(f"{name}.tokens", wire.tokens, counts),
            _cut(f"{name}.parents", wire.parents, counts),
            _cut(f"{name}.sources", wire.sources, counts),
            _cut(f"{name}.scores", wire.scores, wire.score_counts),
            strict=False,
        )
    ]


def _tree(
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    sources: tuple[int, ...],
    scores: tuple[float, ...],
    names: _Names,
) -> TokenTree:
    """As ``trees.decode_tree``, of a tree in columns."""
    if not tokens:
        return EMPTY_TREE
    if not names.sound:
        _refuse_beyond(tokens, sources, scores, names)
    named = names.all
    return _make_tree(tokens=tokens, parents=parents, sources=tuple([named[each] for each in sources]), scores=scores)


def _refuse_beyond(tokens: Sequence[int], sources: Sequence[int], scores: Sequence[float], names: _Names) -> None:
    """Of a message with a tree that breaks a limit: raise if it is this one."""
    if max(len(tokens), len(scores)) > limits.MAX_TREE_NODES:
        raise MalformedTree("tree.tokens", f"{max(len(tokens), len(scores))} entries", f"at most {limits.MAX_TREE_NODES}")
    if max(sources) >= len(names.all):
        raise MalformedTree("tree.sources", max(sources), f"below {len(names.all)}")
    if len(longest := max([names.all[each] for each in sources], key=len)) > limits.MAX_SOURCE_NAME:
        raise MalformedTree("tree.source_names", longest, f"names of at most {limits.MAX_SOURCE_NAME} characters")


def _joined(parts: Iterable[Sequence[_T]]) -> Iterator[_T]:
    return chain.from_iterable(parts)


def _cut(name: str, column: Sequence[_T], counts: Sequence[int]) -> list[tuple[_T, ...]]:
    """A column's entries, as many for each report or draft as ``counts`` say."""
    ends = [0, *accumulate(counts)]
    if ends[-1] != len(column):
        raise InvalidArgument(name, f"{len(column)} entries", f"{ends[-1]}, as they are counted")
    entries = tuple(column[:])
    return [entries[begin:end] for begin, end in pairwise(ends)]


def _check_columns(name: str, *columns: Sequence[object]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise InvalidArgument(name, "columns of several lengths", "columns that are equally long")
