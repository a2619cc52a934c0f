"""A step of many blends in one call; see steps.c. The reference is ``BlendSession``: each observes, then drafts."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.drafter.merging.blend import LEAST
from services.drafter.native.library import drafting_library
from speculation.columns import ReportColumns

# The structs reports and drafts in steps.c.
_REPORTS, _DRAFTS = struct.Struct("13P"), struct.Struct("4P")
NOT_DONE, NO_MEMORY = -1, -2
# Fewer reports take some tens of microseconds; getting the interpreter's lock back from a busy thread may take milliseconds.
_FEW = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TakenSteps:
    """What became of the reports of a step.

    Attributes:
        counts: nodes that each report's session drafts; ``NOT_DONE``: nothing was done for it; ``NO_MEMORY``: it drafts
            none, and suffix decoding could not count the tokens.
        tokens, parents, sources, scores: of all nodes; a source by its number in ``blend.KNOWN``.
    """

    counts: Sequence[int]
    tokens: array[int]
    parents: array[int]
    sources: array[int]
    scores: array[float]


def ready_for(sessions: array[int], reports: ReportColumns) -> bytes:
    """1 for each report whose session may take it, else 0; arguments as of ``take_steps``."""
    ready = array("B", bytes(len(sessions)))
    _library().steps_ready(_address(sessions), _address(reports.committed_counts), len(sessions), _address(ready))
    return ready.tobytes()


def take_steps(sessions: array[int], reports: ReportColumns) -> TakenSteps:
    """Let sessions observe and draft.

    Args:
        sessions: the address of each report's session, as ``CompiledBlendSession.enter`` gave it; 0: nothing is to be done.
    """
    count, room = len(reports), sum(reports.max_nodes)
    counts = array("i", bytes(4 * count))
    tokens, parents, sources = (array("i", bytes(4 * room)) for _ in range(3))
    scores = array("d", bytes(8 * room))
    least = array("d", [max(LEAST, each) for each in reports.min_probabilities])
    told = _REPORTS.pack(*map(_address, _columns(reports)), _address(least))
    drafts = _DRAFTS.pack(_address(tokens), _address(parents), _address(sources), _address(scores))
    made = _taking(count)(_address(sessions), told, count, _address(counts), drafts)
    return TakenSteps(
        counts=counts.tolist(), tokens=tokens[:made], parents=parents[:made], sources=sources[:made], scores=scores[:made]
    )


def _library() -> ctypes.PyDLL:
    library = drafting_library()
    assert library is not None, "sessions are compiled"
    return library


def _taking(count: int) -> Callable[..., int]:
    """The function that takes so many reports: without the interpreter's lock where that lasts, so that a pass may begin."""
    library = _library()
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
