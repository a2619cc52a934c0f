"""Keys and values of all live requests, in blocks of one pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.attention.calls import TILE, Call
from services.verifier.model.to_device import to_device

# Positions per block: those that attention sums up at a time.
BLOCK = TILE
# By their bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Requests for whose tables there are lines at first.
_OWNERS = 64


class KVPool:
    """Blocks for the keys and values of every attention call of a model, or of a part of it.

    ``keys`` has a tensor for every call, [blocks, key-value heads, key size, BLOCK], so that a query's scores for a whole
    block are contiguous. ``values`` has one as well, [blocks, key-value heads, BLOCK, value size + 1]. Its last column is
    always 1, so that one product with the attention weights gives both their weighted sum and their plain sum. With
    ``whole_rows``, as a GPU's kernels read them, this column is left out, and a key's numbers lie side by side as a value's
    do: ``keys`` has the same shape and other strides. Position p of a request lies in the request's block p // BLOCK;
    ``blocks.BlockAllocator`` decides which block of the pool that is.

    Attributes:
        rounded: rows are held as FP8 (e4m3), as our kernels round and read them: bytes, without the column of ones, and for
            each row of a head a scale of its keys and one of its values, in ``key_scales``, ``value_scales``.
    """

    def __init__(
        self, calls: Iterable[Call], *, rows: int, dtype: torch.dtype, device: torch.device, whole_rows: bool = False
    ) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self.dtype = dtype
        self.calls = tuple(sorted(calls, key=lambda call: call.entry))
        self._whole_rows, self._ones, self.rounded = whole_rows, not whole_rows, False
        self._make(-(-rows // BLOCK))
        self._blocks: dict[str, list[int]] = {}
        # The same for compiled code: of each owner an array, and in a line of its own where that lies and how long it is.
        self._tables: dict[str, tuple[array[int], int]] = {}
        self._places = np.zeros((_OWNERS, 2), dtype=np.int64)
        self._lines = [*range(_OWNERS)]
        self._unclean: list[int] = []
        # Of each slot (block * BLOCK + place in it) that is to get another one's row: that slot. Both as before any move.
        self._moves: dict[int, int] = {}

    def _make(self, blocks: int) -> None:
        self.total_blocks = blocks
        # One further block takes what padding rows write; nobody reads it.
        self.padding_block = blocks
        shapes = [(call.kv_heads, call.key_size, call.value_size) for call in self.calls]
        # Calls of one shape share a tensor, [calls, blocks, ...], so that one copy moves a row in all of them.
        self._alike: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.keys: list[torch.Tensor] = [torch.empty(0, dtype=torch.float32)] * len(shapes)
        self.values, self.key_scales, self.value_scales = list(self.keys), list(self.keys), list(self.keys)
        dtype = torch.uint8 if self.rounded else self.dtype
        for heads, key_size, value_size in dict.fromkeys(shapes):
            entries = [entry for entry, shape in enumerate(shapes) if shape == (heads, key_size, value_size)]
            shape = (len(entries), blocks + 1, heads)
            sizes = (BLOCK, key_size) if self._whole_rows else (key_size, BLOCK)
            keys = torch.zeros(*shape, *sizes, dtype=dtype, device=self.device)
            keys = keys.transpose(-1, -2) if self._whole_rows else keys
            values = torch.zeros(*shape, BLOCK, value_size + self._ones, dtype=dtype, device=self.device)
            values[..., value_size:] = 1
            self._alike.append((keys, values))
            for entry, own_keys, own_values in zip(entries, keys, values, strict=True):
                self.keys[entry], self.values[entry] = own_keys, own_values
            if self.rounded:
                # As if they were keys and values of one number, so that what moves rows moves their scales.
                of_all = [
                    torch.zeros(*shape, *each, device=self.device, dtype=torch.float32) for each in ((1, BLOCK), (BLOCK, 1))
                ]
                self._alike.append((of_all[0], of_all[1]))
                for entry, of_keys, of_values in zip(entries, *of_all, strict=True):
                    self.key_scales[entry], self.value_scales[entry] = of_keys, of_values

    def round_rows(self, rows: int) -> None:
        """Hold ``rows`` rows from now on, ``rounded``. No block may be in use."""
        self.rounded, self._ones = True, False
        self._make(-(-rows // BLOCK))

    def grow(self, blocks: int) -> None:
        """Have ``blocks`` blocks, more than now; those there are keep their numbers and what they hold."""
        before, count = self._alike, self.total_blocks
        self._make(blocks)
        for olds, news in zip(before, self._alike, strict=True):
            for old, new in zip(olds, news, strict=True):
                new[:, :count] = old[:, :count]

    def assign(self, owner: str, blocks: Sequence[int], fresh: int) -> None:
        """Append ``blocks`` to those of ``owner``; the last ``fresh`` ones hold none of its tokens yet."""
        self._blocks.setdefault(owner, []).extend(blocks)
        self._note_place(owner, blocks)
        self._unclean += blocks[len(blocks) - fresh :]

    def _note_place(self, owner: str, more: Sequence[int]) -> None:
        """Have compiled code know of ``more`` blocks of an owner."""
        if owner not in self._tables:
            if not self._lines:
                lines = len(self._places)
                self._places = np.concatenate([self._places, np.zeros_like(self._places)])
                self._lines = [*range(lines, len(self._places))]
            self._tables[owner] = array("i"), self._lines.pop()
        table, line = self._tables[owner]
        table.extend(more)
        self._places[line] = table.buffer_info()

    def move(self, owner: str, sources: Sequence[int], start: int) -> None:
        """Have the rows at ``sources`` at ``start``, ``start + 1``, ... in every call, from the next pass on.

        They are noted here, and moved by ``settle``, those of all requests together.
        """
        blocks = self._blocks[owner]
        # What was moved before and waits is found where it lies still.
        self._moves |= {
            _slot(blocks, position): self._moves.get(_slot(blocks, source), _slot(blocks, source))
            for position, source in enumerate(sources, start)
            if position != source
        }

    def settle(self) -> None:
        """Before a pass: move rows, and wipe the values in blocks that have got a new owner.

        Rows that are not written yet are read with weight zero; zero times an infinity left behind would not be zero.
        """
        if self._moves:
            self._move_rows()
        if self._unclean:
            unclean = self._indices(np.array(self._unclean))
            for _, values in self._to_change():
                values[:, unclean, :, :, : values.shape[-1] - self._ones] = 0
            self._unclean = []

    def _move_rows(self) -> None:
        """All rows are read before one is written, so that places may be sources, too; four kernels for a shape of calls."""
        slots, sources = (np.array(list(each)) for each in (self._moves, self._moves.values()))
        places = self._indices(np.stack([slots // BLOCK, slots % BLOCK, sources // BLOCK, sources % BLOCK]))
        to_blocks, to_offsets, from_blocks, from_offsets = places
        for keys, values in self._to_change():
            keys[:, to_blocks, :, :, to_offsets] = keys[:, from_blocks, :, :, from_offsets]
            values[:, to_blocks, :, to_offsets] = values[:, from_blocks, :, from_offsets]
        self._moves = {}

    def _to_change(self) -> Iterable[tuple[Any, Any]]:
        """Keys and values to write into; on a host as arrays, which for a few rows take a quarter of torch's time."""
        if not self._on_host:
            return self._alike
        return [(_as_array(keys), _as_array(values)) for keys, values in self._alike]

    def _indices(self, places: NDArray[np.int64]) -> NDArray[np.int64] | torch.Tensor:
        """Places as indices into what there is ``_to_change``."""
        return places if self._on_host else to_device(places, self.device)

    def clear(self) -> None:
        """Take all blocks from all owners."""
        for owner in [*self._blocks]:
            self.forget(owner)
        self._unclean = []
        self._moves = {}

    def forget(self, owner: str) -> None:
        """Take all blocks from ``owner``, which may have none."""
        if self._blocks.pop(owner, None) is not None:
            self._lines.append(self._tables.pop(owner)[1])

    def blocks_of(self, owner: str) -> list[int]:
        """``owner``'s blocks, in the order of its positions."""
        return self._blocks[owner]

    def tables_of(self, owners: Iterable[str]) -> NDArray[np.int64]:
        """[owners, 2]: where each one's ``blocks_of`` lie, as int32, until it gets more, and how many they are."""
        tables = self._tables
        return self._places[[tables[owner][1] for owner in owners]]


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a tensor on a host, as integers of the same size: what is copied is not looked at."""
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def in_place(rows: Sequence[int]) -> bool:
    """Whether ``rows``, ascending, are the first ones of a pass, so that none of them has to be moved."""
    return not rows or rows[-1] == len(rows) - 1


def _slot(blocks: Sequence[int], position: int) -> int:
    return blocks[position // BLOCK] * BLOCK + position % BLOCK
