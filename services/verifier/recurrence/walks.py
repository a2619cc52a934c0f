"""The order in which a device steps over the rows of a pass, one request at a time; see ``device_steps``.

A row follows its parent directly where that can be, so that the parent's state is at hand. Of a row with several children
the state is put into a *place* until the last of them has begun. Smaller subtrees come first, so a tree of n nodes
needs no more than log2(n) places. All of it is one array of int32:

    requests    each 5 numbers: its first step, its number of steps, its state's slot, its first end, its number of ends
    steps       each 4 numbers: the row; where its parent's state is (``HERE``: with the step before, ``STATE``: in the
                request's slot, else a place); where its own is put (``NOWHERE``, ``STATE``, or a place); a slot in which a
                copy is kept, or ``NOWHERE``
    links       of each row: the row before it, or ``FROM_STATE``; its request's slot. Those of padding are arbitrary
    ends        each 2 numbers: the row at which a chain ends or a state is kept, and the slot for it; a request's own last
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.model.to_device import to_device

# The parent of rows that step from their request's state.
FROM_STATE = -1
HERE, NOWHERE, STATE = -1, -1, -2
REQUEST_INTS, STEP_INTS, LINK_INTS, END_INTS = 5, 4, 2, 2


class Walked(NamedTuple):
    """A request of a pass.

    Attributes:
        slot: of its state.
        parents: of each of its rows the row before it, or ``FROM_STATE``; parents first.
        end: the last row of its chain.
        saved: by row, the slot in which the state behind it is kept.
    """

    slot: int
    parents: Mapping[int, int]
    end: int
    saved: Mapping[int, int]


class WalkStep(NamedTuple):
    """One row; see the module."""

    row: int
    source: int
    target: int
    saved: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateWalk:
    """A pass as the module describes it.

    Attributes:
        numbers: int32, on the device.
        requests: number of requests.
        accepted, rows: numbers of rows that come before the pass's own, and of all, padding included.
        places: number of places.
        steps_at, links_at, ends_at: where these begin in ``numbers``.
    """

    numbers: torch.Tensor
    requests: int
    accepted: int
    rows: int
    places: int
    steps_at: int
    links_at: int
    ends_at: int


class WalkRoom(NamedTuple):
    """For how much a captured pass has room, besides its rows."""

    requests: int
    ends: int
    places: int


def walk(
    requests: Sequence[Walked], accepted: int, rows: int, device: torch.device, room: WalkRoom | None = None
) -> StateWalk:
    """The walk over a pass; ``accepted`` and ``rows``: as in ``StateWalk``.

    Args:
        room: all walks with it lie alike, and are of as many requests, some of which have no steps.
    """
    heads: list[list[int]] = []
    steps: list[WalkStep] = []
    links = np.full((rows, LINK_INTS), (FROM_STATE, 0), dtype=np.int32)
    ends: list[tuple[int, int]] = []
    places = 0
    for request in requests:
        own, used = steps_of(request, places)
        places += used
        own_ends = [*request.saved.items(), (request.end, request.slot)]
        heads.append([len(steps), len(own), request.slot, len(ends), len(own_ends)])
        steps += own
        ends += own_ends
        for row, parent in request.parents.items():
            links[row] = parent, request.slot
    most = WalkRoom(len(heads), len(ends), places) if room is None else room
    assert len(heads) <= most.requests and len(ends) <= most.ends and places <= most.places
    numbers = [
        _padded(heads, REQUEST_INTS, most.requests),
        _padded(steps, STEP_INTS, len(steps) if room is None else rows),
        links.reshape(-1),
        _padded(ends, END_INTS, most.ends),
    ]
    steps_at = len(numbers[0])
    links_at = steps_at + len(numbers[1])
    return StateWalk(
        numbers=to_device(np.concatenate(numbers), device), requests=most.requests, accepted=accepted, rows=rows,
        places=most.places, steps_at=steps_at, links_at=links_at, ends_at=links_at + links.size,
    )  # fmt: skip


def _padded(records: Sequence[Sequence[int]], ints: int, count: int) -> NDArray[np.int32]:
    """Records of so many ints one after the other, and zeros where there are fewer than ``count``."""
    made = np.zeros((count, ints), dtype=np.int32)
    if records:
        made[: len(records)] = records
    return made.reshape(-1)


def steps_of(request: Walked, first_place: int) -> tuple[list[WalkStep], int]:
    """The steps of a request, and how many places it uses, which are numbered from ``first_place`` on."""
    children = _children(request.parents)
    made: list[WalkStep] = []
    # Rows to come, the next one last, each with where its parent's state is, and the place that is free from then on.
    waiting = [(row, STATE, NOWHERE) for row in reversed(children[FROM_STATE])]
    free: list[int] = []
    used, before = 0, FROM_STATE
    while waiting:
        row, source, freed = waiting.pop()
        if freed != NOWHERE:
            free.append(freed)
        behind, target = children.get(row, []), NOWHERE
        if row == request.end:
            target = STATE
        elif len(behind) > 1:
            if not free:
                free.append(first_place + used)
                used += 1
            target = free.pop()
        if before != FROM_STATE and request.parents[row] == before:
            source = HERE
        made.append(WalkStep(row, source, target, request.saved.get(row, NOWHERE)))
        for child in reversed(behind):
            last = child == behind[-1] and target not in (NOWHERE, STATE)
            waiting.append((child, target, target if last else NOWHERE))
        before = row
    return made, used


def _children(parents: Mapping[int, int]) -> dict[int, list[int]]:
    """The rows behind each row, those with the fewest rows behind them first."""
    sizes = dict.fromkeys(parents, 1)
    for row, parent in reversed(list(parents.items())):
        if parent != FROM_STATE:
            sizes[parent] += sizes[row]
    children: dict[int, list[int]] = {}
    for row, parent in parents.items():
        children.setdefault(parent, []).append(row)
    return {parent: sorted(rows, key=sizes.__getitem__) for parent, rows in children.items()}
