"""Launches the kernels that step over rows, for layers with a state; see ``recurrence.device_steps``."""

from __future__ import annotations

import torch
import triton

from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.convolved_rows import convolve, hold_inputs
from services.verifier.kernels.triton.device.keyed_steps import BY_KEY, BY_NUMBER, BY_ONE, divide_by_lengths, step_keyed
from services.verifier.kernels.triton.device.vector_steps import step_gated, step_mean
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.walks import StateWalk

# Keys of a state whose numbers have room in one warp's registers. The order of a sum over keys follows from their number.
MOST_KEYS = 256
# Numbers of a state that a program of one warp has, and of a value: at least 32 bytes side by side.
_NUMBERS, _LEAST_COLUMNS, _MOST_COLUMNS = 1024, 8, 32
# Channels of a program, where there are no sums.
CHANNELS, WALKED_CHANNELS = 256, 128


def columns_of(keys: int) -> int:
    """Numbers of a value that one program steps, by the number of keys."""
    padded: int = triton.next_power_of_2(keys)
    return min(max(_NUMBERS // padded, _LEAST_COLUMNS), _MOST_COLUMNS)


class TritonSteps:
    """Implements ``DeviceSteps``."""

    def refusal(self, shape: tuple[int, ...]) -> str:
        if len(shape) == 3 and shape[1] > MOST_KEYS:
            return f"its states have {shape[1]} keys: must be at most {MOST_KEYS}"
        return ""

    def keyed(self, walk: StateWalk, states: torch.Tensor, rows: KeyedRows) -> torch.Tensor:
        heads, keys, values = states.shape[1:]
        made = states.new_zeros(walk.rows, heads * values)
        columns, none = columns_of(keys), made
        given = {
            name: none if tensor is None else side_by_side(tensor)
            for name, tensor in (
                ("keys", rows.keys), ("queries", rows.queries), ("values", rows.values), ("factors", rows.factors),
                ("times", rows.times), ("parts", rows.parts),
            )
        }  # fmt: skip
        by = BY_NUMBER if rows.factors is None else BY_KEY if rows.factors.shape[2] > 1 else BY_ONE
        step_keyed[(walk.requests, heads, -(-values // columns))](
            *(given[name] for name in ("keys", "queries", "values", "factors", "times")),
            none if rows.decay is None else rows.decay.contiguous(), given["parts"], states, self._places(walk, states),
            made, walk.numbers,
            *(given[name].stride(0) for name in ("keys", "queries", "values", "factors", "times", "parts")), walk.steps_at,
            HEADS=heads, KEY_HEADS=rows.keys.shape[1], KEY=keys, KEYS=triton.next_power_of_2(keys), VALUE=values,
            COLUMNS=columns, BY=by, PARTED=rows.parts is not None, num_warps=1, **COMPILED,
        )  # fmt: skip
        return made[walk.accepted :]

    def units(self, vectors: torch.Tensor, epsilon: float) -> torch.Tensor:
        rows, heads, size = vectors.shape
        vectors = side_by_side(vectors)
        made = vectors.new_empty(rows, heads, size)
        divide_by_lengths[(rows, heads)](
            vectors, made, vectors.stride(0), epsilon, SIZE=size, SIZES=triton.next_power_of_2(size), num_warps=1, **COMPILED
        )
        return made

    def convolved(
        self, walk: StateWalk, states: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        before, channels = states.shape[1:]
        given, blocks = side_by_side(given), -(-channels // CHANNELS)
        made = given.new_empty(walk.rows - walk.accepted, channels)
        convolve[(len(made), blocks)](
            given, weight.contiguous(), made if bias is None else bias, states, made, walk.numbers, given.stride(0),
            channels, walk.accepted, walk.links_at, BEFORE=before, BIAS=bias is not None, BLOCK=CHANNELS, **COMPILED,
        )  # fmt: skip
        if before:
            hold_inputs[(walk.requests, blocks)](
                given, states, walk.numbers, given.stride(0), channels, walk.links_at, walk.ends_at, BEFORE=before,
                BLOCK=CHANNELS, **COMPILED,
            )  # fmt: skip
        return made

    def scanned(self, walk: StateWalk, states: torch.Tensor, factors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        width = states.shape[1]
        factors, added = side_by_side(factors), side_by_side(added)
        made = states.new_zeros(walk.rows, width)
        step_gated[(walk.requests, -(-width // WALKED_CHANNELS))](
            factors, added, states, self._places(walk, states), made, walk.numbers, factors.stride(0), added.stride(0),
            width, walk.steps_at, BLOCK=WALKED_CHANNELS, num_warps=1, **COMPILED,
        )  # fmt: skip
        return made[walk.accepted :]

    def averaged(
        self,
        walk: StateWalk,
        states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decay: torch.Tensor,
        first: torch.Tensor,
    ) -> torch.Tensor:
        width = states.shape[2]
        keys, values = side_by_side(keys), side_by_side(values)
        made = states.new_zeros(walk.rows, width)
        step_mean[(walk.requests, -(-width // WALKED_CHANNELS))](
            keys, values, decay.contiguous(), first.contiguous(), states, self._places(walk, states), made, walk.numbers,
            keys.stride(0), values.stride(0), width, walk.steps_at, BLOCK=WALKED_CHANNELS, num_warps=1, **COMPILED,
        )  # fmt: skip
        return made[walk.accepted :]

    def _places(self, walk: StateWalk, states: torch.Tensor) -> torch.Tensor:
        return states.new_empty(max(1, walk.places), *states.shape[1:])


def side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, [rows, ...], where the numbers of a row lie side by side; the rows themselves may lie apart."""
    expected = 1
    for size, stride in zip(reversed(rows.shape[1:]), reversed(rows.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return rows.contiguous()
        expected *= size
    return rows
