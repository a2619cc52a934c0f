"""How the rows of a pass follow one another, as our kernels read it; see row_paths.h."""

from __future__ import annotations

import ctypes

from services.verifier.recurrence.order import Order


class RowPaths(ctypes.Structure):
    """Mirrors ``struct row_paths``."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("rows", "requests")],
        *[(name, ctypes.c_void_p) for name in ("first", "chain", "row", "parent", "slot")],
    ]


def row_paths(order: Order) -> RowPaths:
    """Of a pass; valid as long as ``order`` is."""
    paths = order.paths
    places = (paths.first, paths.chain, paths.row, paths.parent, order.slots)
    return RowPaths(order.accepted + order.rows, len(order.lines), *[each.data_ptr() for each in places])
