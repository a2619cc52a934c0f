"""A step of many blends in one call; see steps.c. The reference is ``BlendSession``: each observes, then drafts."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.drafter.merging.blend import LEAST
from services.drafter.native.blend import SESSION_BYTES, CompiledBlendSession
from services.drafter.native.library import drafting_library
from speculation.columns import ReportColumns

# The structs reports, outcome and drafts in steps.c.
_REPORTS, _OUTCOME, _DRAFTS = struct.Struct("13P"), 5, struct.Struct("4P")
_NOBODY = bytes(SESSION_BYTES)
NOT_DONE, _NO_MEMORY = -1, -2
# Fewer reports take some tens of microseconds; getting the interpreter's lock back from a busy thread may take milliseconds.
_FEW = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TakenSteps:
    """What became of the reports of a step.

    Attributes:
        counts: nodes that each report's session drafts; ``NOT_DONE``: nothing was done for it.
        tokens, parents, sources, scores: of all nodes; a source by its number in ``blend.KNOWN``.
    """

    counts: Sequence[int]
    tokens: array[int]
    parents: array[int]
    sources: array[int]
    scores: array[float]


def take_steps(
    blends: Sequence[CompiledBlendSession | None], prefixes: Sequence[tuple[int, int]], reports: ReportColumns
) -> TakenSteps:
    """Let sessions observe and draft.

    Args:
        blends: the session of each report; None: nothing is to be done.
        prefixes: length and hash of each session's prefix.
    """
    many = reports.committed_counts
    sessions = b"".join(
        [
            _NOBODY if blend is None else blend.before_step(size, *prefix) or _NOBODY
            for blend, size, prefix in zip(blends, many, prefixes, strict=True)
        ]
    )
    count, room = len(reports), sum(reports.max_nodes)
    outcomes = array("i", bytes(4 * _OUTCOME * count))
    tokens, parents, sources = (array("i", bytes(4 * room)) for _ in range(3))
    scores = array("d", bytes(8 * room))
    least = array("d", [max(LEAST, each) for each in reports.min_probabilities])
    told = _REPORTS.pack(*map(_address, _columns(reports)), _address(least))
    drafts = _DRAFTS.pack(_address(tokens), _address(parents), _address(sources), _address(scores))
    made = _taking(count)(sessions, told, count, _address(outcomes), drafts)
    counts: list[int] = []
    first = 0
    told_of_each = zip(*[iter(outcomes.tolist())] * _OUTCOME, strict=True)
    for blend, size, probability, (nodes, own, length, shared, reached) in zip(
        blends, many, least, told_of_each, strict=True
    ):
        if blend is not None and nodes != NOT_DONE:
            committed = reports.committed[first : first + size]
            blend.after_step(committed, probability, (own, length), (shared, reached), drafted=nodes != _NO_MEMORY)
        counts.append(0 if nodes == _NO_MEMORY else nodes)
        first += size
    return TakenSteps(
        counts=counts, tokens=tokens[:made], parents=parents[:made], sources=sources[:made], scores=scores[:made]
    )


def _taking(count: int) -> Callable[..., int]:
    """The function that takes so many reports: without the interpreter's lock where that lasts, so that a pass may begin."""
    library = drafting_library()
    assert library is not None, "sessions are compiled"
    found: Callable[..., int] = library.steps_take if count < _FEW else library.steps_take_unlocked
    return found


def _columns(reports: ReportColumns) -> tuple[array[int], ...]:
    return (
        reports.committed,
        reports.committed_counts,
        reports.lengths,
        reports.accepted_paths,
        reports.accepted_counts,
        reports.max_nodes,
        reports.node_counts,
        reports.tokens,
        reports.parents,
        reports.top_counts,
        reports.top_ids,
        reports.prefix_hashes,
    )


def _address(held: array[int] | array[float]) -> int:
    return held.buffer_info()[0]
