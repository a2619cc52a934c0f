"""Tree attention on a CPU with a native kernel; see tree_attention.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch

from services.verifier.attention.calls import TILE, Call
from services.verifier.attention.stream_layout import streams_last
from services.verifier.kernels.native.layer_adapter import AdaptedRows
from services.verifier.kernels.native.library import Library
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from speculation.tree import ROOT

# Must equal the constants in vectors.h and tree_attention.c.
_COLUMNS = 16
_LARGEST_HEAD = 512
# Queries (a row under one head) that share the reads of a tile. More would not fit into a core's own cache.
_BLOCK_QUERIES = 24

_INTEGERS = ("rows", "blocks", "slots", "scratch_per_thread", "threads")
_ARRAYS = ("tiles", "row_tiles", "own_slot", "position", "straight", "path", "row_path", "block_rows", "scratch")
_STRIDES = ("query_head", "query_row", "key_head", "key_row", "value_head", "value_row")
_OF_CALL = (
    "bias_width", "bias_by_distance", "heads", "kv_heads", "size", "value_size", "window", "chunk",
)  # fmt: skip


class _Layout(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _INTEGERS] + [(name, ctypes.c_void_p) for name in _ARRAYS]


class AttentionLayer(ctypes.Structure):
    """The struct in tree_attention.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("query", "key", "value")],
        *[(name, ctypes.c_int64) for name in _STRIDES],
        *[(name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "out", "sinks", "bias")],
        *[(name, ctypes.c_int64) for name in _OF_CALL],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
    ]


class Kernel:
    """The compiled attention kernel."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.attend = library.functions.outrider_attend
        self.attend.argtypes = [ctypes.POINTER(_Layout), ctypes.POINTER(AttentionLayer)]
        self.attend.restype = None


def kernel_for(kernels: Library | None, pool: KVPool) -> Kernel | None:
    """The kernel for the pool's attention calls; None if it is not available or cannot compute them."""
    if kernels is None or not pool.calls or pool.device.type != "cpu" or pool.dtype != torch.float32:
        return None
    sizes = {size for call in pool.calls for size in (call.key_size, call.value_size)}
    return None if any(size % _COLUMNS or size > _LARGEST_HEAD for size in sizes) else Kernel(kernels)


@dataclass(kw_only=True, slots=True)
class NativePass:
    """Inputs of one forward pass besides its token ids; implements ``attention.Pass``.

    Attributes:
        positions: [rows], int64, the position of each row in its own request.
        stream_rows: number of the stream rows, the last rows of all.
        adapted: the rows that have adapters.
        held: tensors that ``layout`` points to.
    """

    kernel: Kernel
    pool: KVPool
    positions: torch.Tensor
    layout: _Layout
    stream_rows: int = 0
    adapted: Sequence[AdaptedRows] = ()
    held: list[torch.Tensor] = field(default_factory=list)
    _rooms: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Raises:
        NotImplementedError: a tensor is not float32.
        """
        query, key, value = (_rows_whole(tensor) for tensor in (query, key, value))
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:2]]
        arguments = self.layer(call)
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        arguments.out = out.data_ptr()
        for name, stride in zip(_STRIDES, strides, strict=True):
            setattr(arguments, name, stride)
        self.kernel.attend(self.layout, arguments)
        return out

    def layer(self, call: Call) -> AttentionLayer:
        """The arguments of the kernel for a call, without queries, keys, values and output."""
        made = AttentionLayer(
            keys=self.pool.keys[call.entry].data_ptr(),
            values=self.pool.values[call.entry].data_ptr(),
            heads=call.heads,
            kv_heads=call.kv_heads,
            size=call.key_size,
            value_size=call.value_size,
            window=call.window or 0,
            chunk=call.chunk or 0,
            scale=call.scale,
            softcap=call.softcap or 0,
        )
        if self.pool.rounded:
            made.key_scales = self.pool.key_scales[call.entry].data_ptr()
            made.value_scales = self.pool.value_scales[call.entry].data_ptr()
        if call.sinks is not None:
            made.sinks = call.sinks.data_ptr()
        if call.bias is not None:
            made.bias, made.bias_width = call.bias.table.data_ptr(), call.bias.table.shape[1]
            made.bias_by_distance = call.bias.by_distance
        return made

    def room(self, widths: tuple[int, ...]) -> list[torch.Tensor]:
        """Buffers, [rows, width] each, that all layers share."""
        if widths not in self._rooms:
            self._rooms[widths] = [torch.empty(len(self.positions), width, dtype=torch.float32) for width in widths]
        return self._rooms[widths]


def _rows_whole(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        raise NotImplementedError(f"its attention is in {tensor.dtype}")
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def lay_out(
    kernel: Kernel, pool: KVPool, batch: Sequence[Rows], padding: int, stream_rows: Sequence[int] | None = None
) -> NativePass:
    """Lay out ``batch``, followed by ``padding`` rows that belong to no request.

    Args:
        stream_rows: of each entry, the number of its stream rows, its last rows: they are put behind all others.
    """
    tables = _Tables()
    for rows in batch:
        tables.add(rows, pool.blocks_of(rows.request_id))
    for _ in range(padding):
        tables.add(Rows(request_id="", context=0, tokens=(0,), logits=0), [pool.padding_block])
    if stream_rows is not None:
        tables.reorder(streams_last(batch, padding, stream_rows))
    return _laid_out(kernel, pool, tables, sum(stream_rows or ()))


def lay_out_placed(kernel: Kernel, pool: KVPool, batch: Sequence[PlacedRows]) -> NativePass:
    """Lay out rows whose places in the cache are given."""
    tables = _Tables()
    for rows in batch:
        tables.add_placed(rows, pool.blocks_of(rows.owner))
    return _laid_out(kernel, pool, tables, 0)


def _laid_out(kernel: Kernel, pool: KVPool, tables: _Tables, stream_rows: int) -> NativePass:
    block_rows = tables.block_rows(max(1, _BLOCK_QUERIES // max(call.share for call in pool.calls)))
    slots = (max(tables.own_slot) // TILE + 1) * TILE
    most = max(b - a for a, b in pairwise(block_rows))
    per_thread = max(
        most * call.share * (slots + call.key_size + call.value_size + 1)
        + pool.rounded * TILE * (max(call.key_size, call.value_size) + call.value_size)
        for call in pool.calls
    )
    arrays = [
        torch.tensor(numbers, dtype=torch.int64)
        for numbers in (
            tables.tiles, tables.row_tiles, tables.own_slot, tables.position, tables.straight, tables.path, tables.row_path,
            block_rows,
        )
    ]  # fmt: skip
    threads = torch.get_num_threads()
    # Of a stated type: while a model is made in another thread, transformers changes the default for the whole process.
    arrays.append(torch.empty(threads * per_thread, dtype=torch.float32))
    integers = (len(tables.position), len(block_rows) - 1, slots, per_thread, threads)
    layout = _Layout(*integers, *[array.data_ptr() for array in arrays])
    return NativePass(kernel=kernel, pool=pool, positions=arrays[3], layout=layout, stream_rows=stream_rows, held=arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRows:
    """Rows of one owner in a pass, which go to its slots from ``first`` on.

    Attributes:
        positions: [rows].
        straight: of all rows: below it, positions are slots.
        paths: [rows], the slots that a row sees at its positions from ``straight`` on, its own the last; empty if its own
            position is below.
    """

    owner: str
    first: int
    positions: Sequence[int]
    straight: int
    paths: Sequence[Sequence[int]]


class _Tables:
    """The kernel's tables, named as in tree_attention.c."""

    def __init__(self) -> None:
        self.tiles: list[int] = []
        self.row_tiles: list[int] = []
        self.own_slot: list[int] = []
        self.position: list[int] = []
        self.straight: list[int] = []
        self.path: list[int] = []
        self.row_path: list[int] = []
        # Of each row, the number of its request.
        self._request: list[int] = []
        self._requests = 0

    def add(self, rows: Rows, owned: list[int]) -> None:
        """Add the rows of one request."""
        count, end = len(rows.tokens), rows.context + rows.chain
        if rows.context + count > len(owned) * TILE:
            raise IndexError(f"{rows.request_id} owns {len(owned)} blocks: not enough for {rows.context + count} rows")
        self._request += [self._requests] * count
        self._requests += 1
        self.row_tiles += [len(self.tiles)] * count
        # Only the tiles that the rows reach; a request may own more.
        self.tiles += owned[: (rows.context + count - 1) // TILE + 1]
        self.own_slot += range(rows.context, rows.context + count)
        self.position += range(rows.context, end)
        self.straight += [end] * count
        self.row_path += [len(self.path)] * rows.chain
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(rows.parents):
            paths.append((*(() if parent == ROOT else paths[parent]), end + node))
            self.row_path.append(len(self.path))
            self.path += paths[-1]
            self.position.append(end + len(paths[-1]) - 1)

    def add_placed(self, rows: PlacedRows, owned: list[int]) -> None:
        """Add rows of one owner at given places."""
        count, end = len(rows.positions), rows.first + len(rows.positions)
        if end > len(owned) * TILE:
            raise IndexError(f"{rows.owner} owns {len(owned)} blocks: not enough for {end} rows")
        self._request += [self._requests] * count
        self._requests += 1
        self.row_tiles += [len(self.tiles)] * count
        self.tiles += owned[: (end - 1) // TILE + 1]
        self.own_slot += range(rows.first, end)
        self.position += rows.positions
        self.straight += [rows.straight] * count
        for path in rows.paths:
            self.row_path.append(len(self.path))
            self.path += path

    def reorder(self, order: Sequence[int]) -> None:
        """Put the rows of these numbers at places 0, 1, ..."""
        for table in (self.row_tiles, self.own_slot, self.position, self.straight, self.row_path, self._request):
            table[:] = [table[row] for row in order]

    def block_rows(self, most: int) -> list[int]:
        """First rows of blocks of at most ``most`` neighbouring rows of one request, and the end of the last block."""
        starts: list[int] = []
        row = 0
        for _, members in groupby(self._request):
            count = len(list(members))
            starts += range(row, row + count, most)
            row += count
        return [*starts, row]
