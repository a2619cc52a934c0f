"""States that hold values by their keys, stepped on a CPU by a native kernel; see keyed_states.c."""

from __future__ import annotations

import ctypes

import torch

from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.path_struct import RowPaths, row_paths
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.order import Order

# Must equal the constants in vectors.h and keyed_states.c.
_APART, _COLUMNS, _PANEL = 4, 16, 32
# Fewer numbers than these are stepped by one thread.
_ALONE = 2**15

_INTEGERS = ("heads", "key_heads", "keys", "values", "scratch_per_thread", "threads", "per_key")
_NUMBERS = ("key", "query", "value", "factor", "time", "decay", "part", "state", "made", "scratch")


class _KeyedRows(ctypes.Structure):
    """The struct in keyed_states.h."""

    _fields_ = [
        ("paths", RowPaths),
        *[(name, ctypes.c_int64) for name in _INTEGERS],
        *[(name, ctypes.c_void_p) for name in _NUMBERS],
    ]


def fits(states: torch.Tensor) -> bool:
    """Whether the kernel steps states of this shape, [slots, heads, key size, value size]."""
    keys, values = states.shape[2:]
    return states.device.type == "cpu" and keys % _APART == 0 and values % _COLUMNS == 0


def step_keyed(library: Library, order: Order, states: torch.Tensor, rows: KeyedRows) -> torch.Tensor:
    """Step all rows of a pass, and change ``states`` to those at the ends of the chains.

    Args:
        states: [slots, heads, key size, value size], which ``fits``.

    Returns:
        [rows, heads * value size], of the pass's own rows and padding, which is zeros.
    """
    heads, keys, values = states.shape[1:]
    paths = order.paths
    threads = torch.get_num_threads() if len(paths.row) * heads * keys * values > _ALONE else 1
    made = torch.zeros(heads, order.accepted + order.rows, values, dtype=torch.float32)
    scratch = torch.empty(threads, (1 + paths.most_nodes) * keys * _PANEL, dtype=torch.float32)
    given = {
        "key": rows.keys, "query": rows.queries, "value": rows.values, "factor": rows.factors, "time": rows.times,
        "part": rows.parts,
    }  # fmt: skip
    # Rows of a head side by side: at a distance of all heads they would share the same few places of a cache.
    held = {name: tensor.transpose(0, 1).contiguous() for name, tensor in given.items() if tensor is not None}
    held |= {} if rows.decay is None else {"decay": rows.decay.contiguous()}
    held |= {"state": states, "made": made, "scratch": scratch}
    arguments = _KeyedRows(
        paths=row_paths(order), heads=heads, key_heads=rows.keys.shape[1], keys=keys, values=values,
        scratch_per_thread=scratch.shape[1], threads=threads, per_key=rows.factors is not None and rows.factors.shape[2] > 1,
        **{name: tensor.data_ptr() for name, tensor in held.items()},
    )  # fmt: skip
    step = library.functions.outrider_step_keyed
    step.restype = None
    step(ctypes.byref(arguments))
    return made[:, order.accepted :].transpose(0, 1).flatten(1)
