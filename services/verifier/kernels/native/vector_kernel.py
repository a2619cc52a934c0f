"""States of some numbers for each channel, stepped on a CPU by native kernels; see convolved_rows.c and vector_steps.c."""

from __future__ import annotations

import ctypes

import torch

from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.path_struct import RowPaths, row_paths
from services.verifier.recurrence.order import Order

# Must equal the constants in vectors.h, convolved_rows.c and vector_steps.c.
_COLUMNS, _CHANNELS, _HELD, _MOST_TAPS = 16, 256, 3, 8
# Fewer numbers than these are stepped by one thread.
_ALONE = 2**15


class _ConvolvedRows(ctypes.Structure):
    """The struct in convolved_rows.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("accepted", "rows", "requests", "channels", "taps", "threads", "apart")],
        *[(name, ctypes.c_void_p) for name in ("slot", "end", "window", "given", "weight", "bias", "state", "made")],
    ]


class _GatedRows(ctypes.Structure):
    """The first struct in vector_steps.h."""

    _fields_ = [
        ("paths", RowPaths),
        *[(name, ctypes.c_int64) for name in ("width", "threads", "apart")],
        *[(name, ctypes.c_void_p) for name in ("factor", "added", "state", "made")],
    ]


class _AveragedRows(ctypes.Structure):
    """The second struct in vector_steps.h."""

    _fields_ = [
        ("paths", RowPaths),
        *[(name, ctypes.c_int64) for name in ("width", "threads", "scratch_per_thread", "apart")],
        *[(name, ctypes.c_void_p) for name in ("key", "value", "decay", "bonus", "state", "made", "scratch")],
    ]


def fits(states: torch.Tensor) -> bool:
    """Whether the kernels step states of this shape, [slots, ..., width]."""
    return states.device.type == "cpu" and states.shape[-1] % _COLUMNS == 0


def fits_convolution(states: torch.Tensor) -> bool:
    """Whether the kernel convolves with states of this shape, [slots, taps - 1, channels]."""
    return fits(states) and states.shape[1] < _MOST_TAPS


def convolved(
    library: Library,
    order: Order,
    states: torch.Tensor,
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As ``DeviceSteps.convolved``; the states are those that ``fits_convolution`` takes."""
    channels, taps = weight.shape
    # All have names here, so that they live as long as the call.
    given, windows = _side_by_side(given), order.windows(taps - 1)
    weight = weight.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    made = torch.empty(order.rows, channels, dtype=torch.float32)
    _call(
        library,
        "outrider_convolve",
        _ConvolvedRows(
            accepted=order.accepted, rows=len(given), requests=len(order.lines), channels=channels, taps=taps,
            threads=_threads(made), apart=given.stride(0), slot=order.slots.data_ptr(), end=order.ends.data_ptr(),
            window=windows.data_ptr(), given=given.data_ptr(), weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(), state=states.data_ptr(), made=made.data_ptr(),
        ),
    )  # fmt: skip
    return made


def scanned(
    library: Library, order: Order, states: torch.Tensor, factors: torch.Tensor, added: torch.Tensor
) -> torch.Tensor:
    """As ``DeviceSteps.scanned``; ``factors`` and ``added`` are parts of the same rows."""
    made = torch.zeros(order.accepted + order.rows, states.shape[1], dtype=torch.float32)
    _call(
        library,
        "outrider_step_gated",
        _GatedRows(
            paths=row_paths(order), width=states.shape[1], threads=_threads(made), apart=factors.stride(0),
            factor=factors.data_ptr(), added=added.data_ptr(), state=states.data_ptr(), made=made.data_ptr(),
        ),
    )  # fmt: skip
    return made[order.accepted :]


def averaged(
    library: Library,
    order: Order,
    states: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    first: torch.Tensor,
) -> torch.Tensor:
    """As ``DeviceSteps.averaged``; ``keys`` and ``values`` are parts of the same rows."""
    made = torch.zeros(order.accepted + order.rows, states.shape[2], dtype=torch.float32)
    threads = _threads(made)
    decay, first = decay.contiguous(), first.contiguous()
    scratch = torch.empty(threads, (1 + order.paths.most_nodes) * _HELD * _CHANNELS, dtype=torch.float32)
    _call(
        library,
        "outrider_step_mean",
        _AveragedRows(
            paths=row_paths(order), width=states.shape[2], threads=threads, scratch_per_thread=scratch.shape[1],
            apart=keys.stride(0), key=keys.data_ptr(), value=values.data_ptr(), decay=decay.data_ptr(),
            bonus=first.data_ptr(), state=states.data_ptr(), made=made.data_ptr(), scratch=scratch.data_ptr(),
        ),
    )  # fmt: skip
    return made[order.accepted :]


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose numbers lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _threads(made: torch.Tensor) -> int:
    return torch.get_num_threads() if made.numel() > _ALONE else 1


def _call(library: Library, name: str, arguments: ctypes.Structure) -> None:
    function = getattr(library.functions, name)
    function.restype = None
    function(ctypes.byref(arguments))
