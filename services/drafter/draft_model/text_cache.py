"""The keys and values of one session in the draft model: those of its text, and of the drafts behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Rows that a buffer begins with; it doubles when it is full.
_FIRST = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRows:
    """Rows of one session in a forward pass, already entered into its cache.

    Attributes:
        first: index of the first row.
        tokens: [rows], the draft model's ids.
        positions: [rows], counted from the first row of the cache.
        mask: [rows, rows of the cache], which rows each of them sees; None: all.
        logits: how many of the last rows want logits.
    """

    cache: TextCache
    first: int
    tokens: Sequence[int]
    positions: Sequence[int]
    mask: torch.Tensor | None
    logits: int


class TextCache:
    """Rows of the text, in its order, and behind them the rows of a tree of drafts, each with its parent.

    Keys and values lie in buffers [key-value heads, capacity, size], two for each attention layer, made when the layer first
    writes. Nothing is copied when rows are dropped; when a branch other than the first is accepted, its few rows are moved.

    Attributes:
        text: how many rows are the text's.
    """

    def __init__(self) -> None:
        self.text = 0
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._positions: list[int] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._buffers)

    def clear(self) -> None:
        """Forget all rows, and free the buffers."""
        self._cut(0)
        self.text = 0
        self._buffers.clear()

    def restart(self) -> None:
        """Forget all rows: the text begins elsewhere."""
        self._cut(0)
        self.text = 0

    # In the mode in which the buffers were written.
    @torch.inference_mode()
    def keep(self, text: Sequence[int]) -> int:
        """Roll back to what ``text`` says: rows of drafts that it goes on with become rows of the text, others are dropped.

        The last token of the text always has no row afterwards, since its logits are wanted anew.

        Args:
            text: begins with the tokens of the rows of the text.

        Returns:
            How many rows the text has now.
        """
        node, path = self.text - 1, []
        for token in text[self.text : len(text) - 1]:
            below = range(max(node + 1, self.text), len(self._tokens))
            found = next((row for row in below if self._parents[row] == node and self._tokens[row] == token), None)
            if found is None:
                break
            path.append(found)
            node = found
        end = self.text + len(path)
        if path and path[-1] != end - 1:
            rows = torch.tensor(path)
            for buffers in self._buffers:
                for held in buffers:
                    held[:, self.text : end] = held[:, rows.to(held.device)]
        for row, token in enumerate((self._tokens[row] for row in path), self.text):
            self._tokens[row], self._parents[row], self._positions[row] = token, row - 1, row
        self.text = min(end, len(text) - 1)
        self._cut(self.text)
        return self.text

    def add_text(self, tokens: Sequence[int], logits: int) -> NewRows:
        """Enter rows that continue the text; there must be no rows of drafts.

        Args:
            logits: how many of the last ones want logits.
        """
        first = self.text
        self.text += len(tokens)
        return self._add(tokens, range(first - 1, self.text - 1), logits)

    def add_drafts(self, tokens: Sequence[int], parents: Sequence[int]) -> NewRows:
        """Enter rows of drafts. ``parents`` are rows entered before; the text's last row is ``text`` - 1."""
        return self._add(tokens, parents, len(tokens))

    def _add(self, tokens: Sequence[int], parents: Sequence[int], logits: int) -> NewRows:
        first = len(self._tokens)
        for token, parent in zip(tokens, parents, strict=True):
            self._tokens.append(token)
            self._parents.append(parent)
            self._positions.append(self._positions[parent] + 1 if parent >= 0 else 0)
        return NewRows(
            cache=self,
            first=first,
            tokens=tokens,
            positions=self._positions[first:],
            mask=self._mask(first),
            logits=logits,
        )

    def _mask(self, first: int) -> torch.Tensor | None:
        rows = len(self._tokens)
        if rows <= self.text:
            return None if rows - first == 1 else torch.ones(rows - first, rows, dtype=torch.bool).tril(first)
        if all(self._parents[row] == row - 1 for row in range(self.text, rows)) and rows - first == 1:
            return None
        mask = torch.ones(rows - first, rows, dtype=torch.bool)
        mask[:, self.text :] = False
        for row in range(first, rows):
            seen = row
            while seen >= self.text:
                mask[row - first, seen] = True
                seen = self._parents[seen]
        return mask

    def _cut(self, rows: int) -> None:
        del self._tokens[rows:], self._parents[rows:], self._positions[rows:]

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

    def positions(self, rows: int) -> Sequence[int]:
        """The positions of the first ``rows`` rows."""
        return self._positions[:rows]


def _buffer(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return like.new_empty(like.shape[0], capacity, like.shape[2])


def _grown(buffer: torch.Tensor, needed: int, held: int) -> torch.Tensor:
    larger = _buffer(buffer, max(needed, _FIRST, 2 * buffer.shape[1]))
    larger[:, :held] = buffer[:, :held]
    return larger
