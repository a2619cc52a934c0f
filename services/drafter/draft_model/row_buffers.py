"""The keys and values of one session's rows in torch's memory, and which rows see which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.drafter.draft_model.text_cache import NewRows

# Rows that a buffer begins with; it doubles when it is full.
_FIRST = 256


class RowBuffers:
    """Implements ``HeldRows``: two buffers [key-value heads, capacity, size] for each attention layer, made when it first
    writes."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._buffers)

    # In the mode in which the buffers were written.
    @torch.inference_mode()
    def move(self, rows: Sequence[int], first: int) -> None:
        for buffers in self._buffers:
            for held in buffers:
                held[:, first : first + len(rows)] = held[:, torch.tensor(rows, device=held.device)]

    def clear(self) -> None:
        self._buffers.clear()

    def store(self, layer: int, new: NewRows, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values of new rows, [key-value heads, rows, size]; returns those of all rows so far."""
        end = new.first + len(new.tokens)
        while layer >= len(self._buffers):
            self._buffers.append((_buffer(key, 0), _buffer(value, 0)))
        keys, values = self._buffers[layer]
        if keys.shape[1] < end:
            keys, values = _grown(keys, end, new.first), _grown(values, end, new.first)
            self._buffers[layer] = keys, values
        keys[:, new.first : end] = key
        values[:, new.first : end] = value
        return keys[:, :end], values[:, :end]


def mask_of(new: NewRows) -> torch.Tensor | None:
    """[rows, rows of the cache], which of them each new row sees; None: all."""
    count, first = len(new.tokens), new.first
    end = first + count
    if count == 1 and (end <= new.text or list(new.paths[0]) == list(range(new.text, end))):
        return None
    mask = torch.ones(count, end, dtype=torch.bool).tril(first)
    mask[:, new.text :] = False
    for row, path in enumerate(new.paths):
        mask[row, first + row + 1 : new.text] = False
        mask[row, list(path)] = True
    return mask


def _buffer(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return like.new_empty(like.shape[0], capacity, like.shape[2])


def _grown(buffer: torch.Tensor, needed: int, held: int) -> torch.Tensor:
    larger = _buffer(buffer, max(needed, _FIRST, 2 * buffer.shape[1]))
    larger[:, :held] = buffer[:, :held]
    return larger
