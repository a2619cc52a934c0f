"""States that hold values by their keys: those of selective scans, of linear attention and of delta rules.

Where our compiled kernels run, they step them (``keyed_states.c``), and on a GPU those of ``device_steps``. Otherwise torch
does, by products and sums of whole rows; sums over keys are folded in halves, so that no number depends on which other rows
step at the same time.
"""

from __future__ import annotations

import torch

from services.verifier.kernels.native.step_kernel import fits, step_keyed
from services.verifier.kernels.whole_vectors import filled
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.levels import stepped
from services.verifier.recurrence.order import Order


def read(order: Order, states: torch.Tensor, rows: KeyedRows) -> torch.Tensor:
    """Step all rows of a pass, and change ``states`` to those at the ends of the chains.

    Args:
        states: [slots, heads, key size, value size].

    Returns:
        [rows, heads * value size], what the pass's own rows read; of padding, zeros.
    """
    if order.steps is not None:
        return order.steps.keyed(order.walk, states, rows)
    if order.library is not None and fits(states):
        return step_keyed(order.library, order, states, rows)

    def step(state: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, queries = (_of_heads(each[at], state.shape[1]) for each in (rows.keys, rows.queries))
        parts = None if rows.parts is None else rows.parts[at][..., None]
        state = written(state, _factors(rows, at), keys, rows.values[at], parts)
        return state, _folded(state * queries).flatten(1)

    return stepped(order, states, states.shape[1] * states.shape[3], step)


def written(
    state: torch.Tensor, factors: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, parts: torch.Tensor | None
) -> torch.Tensor:
    """The states after rows with these keys and values.

    Args:
        state: [rows, heads, key size, value size].
        factors: [rows, heads, 1 or key size, 1 or value size], by which a state decays first.
        keys: [rows, heads, key size, 1].
        values: [rows, heads, value size].
        parts: [rows, heads, 1]; see ``KeyedRows``.
    """
    state = state * factors
    if parts is not None:
        values = (values - _folded(state * keys)) * parts
    return state + keys * values[:, :, None]


def _factors(rows: KeyedRows, at: torch.Tensor) -> torch.Tensor:
    if rows.factors is not None:
        return rows.factors[at][..., None]
    assert rows.times is not None and rows.decay is not None
    return filled("exp", rows.times[at][:, :, None] * rows.decay)


def _of_heads(vectors: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, heads, key size, 1], from those of key heads."""
    return vectors.repeat_interleave(heads // vectors.shape[1], dim=1)[..., None]


def _folded(numbers: torch.Tensor) -> torch.Tensor:
    """The sum over keys, the third dimension: its second half is added to the first one until one number is left."""
    while (count := numbers.shape[2]) > 1:
        half = count // 2
        sums = numbers[:, :, :half] + numbers[:, :, half : 2 * half]
        numbers = torch.cat([sums, numbers[:, :, 2 * half :]], dim=2) if count % 2 else sums
    return numbers[:, :, 0]
