"""The rows of a pass by their depth: all rows of one depth step together, each from its parent's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from services.verifier.recurrence.order import Order
from services.verifier.recurrence.walks import FROM_STATE

# Steps some rows from their parents' states, [rows, ...]. Returns the rows' states, and their outputs, [rows, width].
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Level:
    """Rows of one depth.

    Attributes:
        rows: [rows], their numbers in the pass.
        before: [rows], the places of their parents in the level before; in the first level, the requests whose states.
        ends: [ends], places of the rows at which a request's chain ends; ``slots``: its state's slot.
    """

    rows: torch.Tensor
    before: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor


def stepped(order: Order, states: torch.Tensor, width: int, step: Step) -> torch.Tensor:
    """Step over all rows of a pass, and change ``states`` to those at the ends of the chains.

    Returns:
        [rows, width], of the pass's own rows and padding, which is zeros.
    """
    made = states.new_zeros(order.accepted + order.rows, width)
    reached = states[order.slots]
    for level in _levels(order):
        reached, made[level.rows] = step(reached[level.before], level.rows)
        states[level.slots] = reached[level.ends]
    return made[order.accepted :]


def _levels(order: Order) -> Iterator[_Level]:
    for rows in _by_depth(order):
        numbers, before, ends, slots = (torch.tensor(each, dtype=torch.int64, device=order.device) for each in rows)
        yield _Level(rows=numbers, before=before, ends=ends, slots=slots)


def _by_depth(order: Order) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Of each depth: the fields of ``_Level``."""
    last = {end: line.slot for end, line in zip(order.ends.tolist(), order.lines, strict=True)}
    places: dict[int, tuple[int, int]] = {}
    found: list[tuple[list[int], list[int], list[int], list[int]]] = []
    for row, parent, request in order.parents:
        depth, before = (0, request) if parent == FROM_STATE else (places[parent][0] + 1, places[parent][1])
        if depth == len(found):
            found.append(([], [], [], []))
        rows, befores, ends, slots = found[depth]
        places[row] = depth, len(rows)
        if row in last:
            ends.append(len(rows))
            slots.append(last[row])
        rows.append(row)
        befores.append(before)
    return found
