"""Step reports and drafts of several sessions, each in one message by columns (drafting.proto).

A message of its own for every session costs more than all that is in it: a step has as many reports as requests. What is
rare in them, as hidden states or sampled drafts, has no column; such ones travel alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider.internal.v1 import drafting_pb2
from services.links.codec.checks import check_size
from services.links.codec.packed import cut, joined, packed, small, unpacked
from services.links.codec.tree_columns import Nodes, tree_of, trees_of, unpacked_trees, write_trees
from speculation import limits
from speculation.columns import DraftColumns, ReportColumns, SentReports
from speculation.errors import InvalidArgument
from speculation.id_rows import ids_in_one, width_of
from speculation.messages import Draft, DraftFailure, StepReport
from speculation.records import maker

_make_draft = maker(Draft)

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
    rows, widths = [len(ids) for ids in reports.top_ids], [width_of(ids) for ids in reports.top_ids]
    # Those of one request may differ from those of another.
    seen = zip(rows, widths, reports.trees, strict=True)
    if any(count and (not width or count != 1 + len(tree.tokens)) for count, width, tree in seen):
        return None
    size = sum(map(len, reports.committed)) + sum(map(len, reports.accepted_paths)) + 5 * len(reports)
    return size + (4 + max([width or 0 for width in widths], default=0)) * sum(rows)


def write_reports(reports: SentReports, made: drafting_pb2.StepReports) -> None:
    """Encode reports, all with room in the columns, into an empty message."""
    made.session_ids.extend(reports.session_ids)
    made.committed = packed("I", joined(reports.committed))
    made.committed_counts = packed("I", map(len, reports.committed))
    made.lengths = packed("I", reports.lengths)
    made.prefix_hashes = packed("Q", reports.prefix_hashes)
    made.accepted_paths = packed("I", joined(reports.accepted_paths))
    made.accepted_counts = packed("I", map(len, reports.accepted_paths))
    made.max_nodes = packed("I", reports.max_nodes)
    made.min_probabilities = packed("d", reports.min_probabilities)
    write_trees(reports.trees, made.trees)
    made.top_ids = packed("I", ids_in_one(reports.top_ids))
    made.top_counts = packed("I", [width_of(rows) or 0 for rows in reports.top_ids])


def read_reports(wire: drafting_pb2.StepReports) -> list[StepReport]:
    """The reports of a message.

    Raises:
        InvalidArgument: its columns do not fit together, or a report breaks a limit.
    """
    counts, nodes, tops = (_column(wire, name) for name in ("committed_counts", "max_nodes", "top_counts"))
    check_size("steps.committed", max(counts, default=0), limits.MAX_TREE_NODES + 1)
    check_size("steps.max_nodes", max(nodes, default=0), limits.MAX_TREE_NODES)
    trees = [tree_of(*each) for each in trees_of("steps.trees", wire.trees)]
    names, lengths, path_counts = wire.session_ids[:], _column(wire, "lengths"), _column(wire, "accepted_counts")
    hashes, least = _column(wire, "prefix_hashes", "Q"), _column(wire, "min_probabilities", "d")
    _check_columns("steps", names, counts, lengths, hashes, path_counts, nodes, least, trees, tops)
    sizes = [top * (1 + len(tree.tokens)) for top, tree in zip(tops, trees, strict=True)]
    return SentReports(
        session_ids=names,
        committed=cut("steps.committed", _column(wire, "committed"), counts),
        lengths=lengths,
        prefix_hashes=hashes,
        accepted_paths=cut("steps.accepted_paths", _column(wire, "accepted_paths"), path_counts),
        max_nodes=nodes,
        min_probabilities=least,
        trees=trees,
        top_ids=[*map(_rows, tops, cut("steps.top_ids", _column(wire, "top_ids"), sizes))],
    ).alone()


def _column(wire: drafting_pb2.StepReports, name: str, kind: str = "I") -> array[Any]:
    """A column of reports.

    Raises:
        InvalidArgument: see ``unpacked``.
    """
    return unpacked(f"steps.{name}", kind, getattr(wire, name))


def read_report_columns(wire: drafting_pb2.StepReports) -> ReportColumns | None:
    """The reports of a message as columns; None where ``read_reports`` refuses one, or a number is too large."""
    own = wire.committed, wire.committed_counts, wire.lengths, wire.accepted_paths, wire.accepted_counts, wire.max_nodes
    shown = wire.top_counts, wire.top_ids
    if not all(map(small, (*own, *shown))):
        return None
    try:
        committed, committed_counts, lengths, paths, path_counts, nodes = (unpacked("steps", "i", each) for each in own)
        tops, ids = (unpacked("steps", "i", each) for each in shown)
        hashes, least = _column(wire, "prefix_hashes", "Q"), _column(wire, "min_probabilities", "d")
        trees = unpacked_trees("steps.trees", wire.trees)
    except InvalidArgument:
        return None
    counts, size = trees.counts, sum(trees.counts)
    each = (committed_counts, lengths, path_counts, nodes, counts, tops, hashes, least, trees.score_counts)
    rows = sum([top * (1 + nodes) for top, nodes in zip(tops, counts, strict=False)])
    parts = (
        (sum(committed_counts), committed), (sum(path_counts), paths), (size, trees.tokens), (size, trees.parents),
        (size, trees.sources), (sum(trees.score_counts), trees.scores), (rows, ids),
    )  # fmt: skip
    count = len(wire.session_ids)
    fits = all(len(column) == count for column in each) and all(size == len(column) for size, column in parts)
    few = max(committed_counts, default=0) <= limits.MAX_TREE_NODES + 1 and max(nodes, default=0) <= limits.MAX_TREE_NODES
    if not (fits and few and trees.signed and trees.names.sound):
        return None
    return ReportColumns(
        read=partial(read_reports, wire),
        session_ids=wire.session_ids[:],
        committed=committed,
        committed_counts=committed_counts,
        lengths=lengths,
        prefix_hashes=hashes,
        accepted_paths=paths,
        accepted_counts=path_counts,
        max_nodes=nodes,
        min_probabilities=least,
        node_counts=counts,
        tokens=trees.tokens,
        parents=trees.parents,
        top_counts=tops,
        top_ids=ids,
    )


def _rows(top: int, ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """So many ids in each."""
    return tuple([ids[at : at + top] for at in range(0, len(ids), top)]) if top else ()


def write_drafts(drafts: Sequence[Draft], made: drafting_pb2.Drafts) -> None:
    """Encode drafts, all with room in the columns, into an empty message."""
    made.session_ids.extend([each.session_id for each in drafts])
    made.base_lengths = packed("I", [each.base_length for each in drafts])
    made.base_hashes = packed("Q", [each.base_hash for each in drafts])
    write_trees([each.tree for each in drafts], made.trees)
    made.drafting_s = packed("d", [each.drafting_s for each in drafts])
    made.groups.extend([each.group for each in drafts])


def write_draft_columns(drafts: DraftColumns, made: drafting_pb2.Drafts) -> None:
    """As ``write_drafts``, of drafts that are columns already."""
    count, trees = len(drafts), made.trees
    made.session_ids.extend(drafts.session_ids)
    made.base_lengths = packed("I", drafts.base_lengths)
    made.base_hashes = packed("Q", drafts.base_hashes)
    made.drafting_s = packed("d", [drafts.drafting_s] * count)
    made.groups.extend([drafts.group] * count)
    trees.counts = trees.score_counts = packed("I", drafts.node_counts)
    trees.tokens = packed("I", drafts.tokens)
    trees.parents = packed("i", drafts.parents)
    trees.sources = packed("I", drafts.sources)
    trees.source_names.extend(drafts.source_names)
    trees.scores = packed("f", drafts.scores)


def read_draft_columns(wire: drafting_pb2.Drafts) -> DraftColumns | None:
    """The drafts of a message as columns; None where their groups or times differ, scores lack, or one breaks a limit."""
    try:
        lengths, hashes, took_s = _drafts_columns(wire)
        trees = unpacked_trees("drafts.trees", wire.trees)
    except InvalidArgument:
        return None
    names, groups, counts = wire.session_ids[:], wire.groups[:], trees.counts
    count, nodes = len(names), sum(counts)
    fits = all(len(column) == count for column in (lengths, hashes, counts, took_s, groups)) and all(
        len(column) == nodes for column in (trees.tokens, trees.parents, trees.sources, trees.scores)
    )
    alike = trees.score_counts == counts and len(set(groups)) == 1 == len(set(took_s))
    few = count <= limits.MAX_DRAFTS
    if not (fits and alike and few and len(groups[0]) <= limits.MAX_SOURCE_NAME and 0 <= took_s[0] < float("inf")):
        return None
    if not trees.names.sound:
        return None
    return DraftColumns(
        left=(),
        session_ids=names,
        base_lengths=lengths,
        base_hashes=hashes,
        node_counts=counts,
        tokens=trees.tokens,
        parents=trees.parents,
        sources=trees.sources,
        source_names=trees.names.all,
        scores=trees.scores,
        drafting_s=took_s[0],
        group=groups[0],
    )


def _drafts_columns(wire: drafting_pb2.Drafts) -> tuple[array[int], array[int], array[float]]:
    """Lengths and hashes of prefixes, and seconds, of each draft.

    Raises:
        InvalidArgument: see ``unpacked``.
    """
    lengths, hashes = unpacked("drafts.base_lengths", "I", wire.base_lengths), unpacked("drafts", "Q", wire.base_hashes)
    return lengths, hashes, unpacked("drafts.drafting_s", "d", wire.drafting_s)


def read_drafts(wire: drafting_pb2.Drafts) -> list[Draft | DraftFailure]:
    """The drafts of a message. One that breaks a limit becomes a failure of its session only.

    Raises:
        InvalidArgument: its columns do not fit together, or it has too many.
    """
    check_size("drafts", len(wire.session_ids), limits.MAX_DRAFTS)
    trees = trees_of("drafts.trees", wire.trees)
    names, (lengths, hashes, took_s) = wire.session_ids[:], _drafts_columns(wire)
    _check_columns("drafts", names, lengths, hashes, trees, took_s, wire.groups)
    return [_draft(*each) for each in zip(names, lengths, hashes, trees, took_s, wire.groups[:], strict=True)]


def _draft(
    session_id: str, base_length: int, base_hash: int, nodes: Nodes, drafting_s: float, group: str
) -> Draft | DraftFailure:
    try:
        check_size("draft.group", len(group), limits.MAX_SOURCE_NAME)
        tree = tree_of(*nodes)
    except InvalidArgument as error:
        return DraftFailure(session_id=session_id, reason=f"malformed draft: {error}")
    # Only a statistic: an invalid value is no reason to drop the draft.
    took_s = drafting_s if 0 <= drafting_s < float("inf") else 0.0
    return _make_draft(
        session_id=session_id, base_length=base_length, base_hash=base_hash, tree=tree, drafting_s=took_s, group=group
    )


def _check_columns(name: str, *columns: Sequence[object]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise InvalidArgument(name, "columns of several lengths", "columns that are equally long")
