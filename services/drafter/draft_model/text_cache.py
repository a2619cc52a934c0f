"""The keys and values of one session in the draft model: those of its text, and of the drafts behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class HeldRows(Protocol):
    """Keys and values of a session's rows, wherever its model keeps them."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take."""
        ...

    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows, ascending, to ``first``, ``first`` + 1, ..."""
        ...

    def clear(self) -> None:
        """Free the memory."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRows:
    """Rows of one session in a forward pass, already entered into its cache.

    Attributes:
        first: index of the first row.
        tokens: [rows], the draft model's ids.
        positions: [rows], counted from the first row of the cache.
        text: how many of the cache's rows are the text's: a row sees those up to its own position.
        paths: [rows], the rows of drafts that each one sees, itself the last; empty for rows of the text.
        logits: how many of the last rows want logits.
    """

    cache: TextCache
    first: int
    tokens: Sequence[int]
    positions: Sequence[int]
    text: int
    paths: Sequence[Sequence[int]]
    logits: int


class TextCache:
    """Rows of the text, in its order, and behind them the rows of a tree of drafts, each with its parent.

    Nothing is copied when rows are dropped; when a branch other than the first is accepted, its few rows are moved.

    Args:
        held: their keys and values.

    Attributes:
        text: how many rows are the text's.
    """

    def __init__(self, held: HeldRows) -> None:
        self.held = held
        self.text = 0
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._positions: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that its rows take."""
        return self.held.nbytes

    def clear(self) -> None:
        """Forget all rows, and free their memory."""
        self.restart()
        self.held.clear()

    def restart(self) -> None:
        """Forget all rows: the text begins elsewhere."""
        self._cut(0)
        self.text = 0

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
            self.held.move(path, self.text)
        for row, token in enumerate((self._tokens[row] for row in path), self.text):
            self._tokens[row], self._parents[row], self._positions[row] = token, row - 1, row
        self.text = min(end, len(text) - 1)
        self._cut(self.text)
        return self.text

    def add_text(self, tokens: Sequence[int], logits: int, masks: Sequence[int] = ()) -> NewRows:
        """Enter rows that continue the text; there must be no rows of drafts.

        Args:
            logits: how many of the last ones want logits.
            masks: tokens of rows of drafts behind them, one after the other, which all want logits.
        """
        first = self.text - 1
        self.text += len(tokens)
        return self._add([*tokens, *masks], range(first, first + len(tokens) + len(masks)), logits + len(masks))

    def add_drafts(self, tokens: Sequence[int], parents: Sequence[int]) -> NewRows:
        """Enter rows of drafts. ``parents`` are rows entered before; the text's last row is ``text`` - 1."""
        return self._add(tokens, parents, len(tokens))

    def add_behind_text(self, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> NewRows:
        """Enter rows that continue the text, and behind them a tree of drafts; there must be no rows of drafts.

        Logits are wanted of the text's last row, and of all drafts.

        Args:
            text: at least one token.
            parents: for each of ``tokens`` the place in it of its parent; -1: the text's last row.
        """
        first = self.text
        self.text += len(text)
        rows = [self.text + parent for parent in parents]
        return self._add([*text, *tokens], [*range(first - 1, self.text - 1), *rows], 1 + len(tokens))

    def withdraw(self, rows: NewRows) -> None:
        """Take back the rows of a pass that is not made after all, the last that were entered."""
        self.text = min(self.text, rows.first)
        self._cut(rows.first)

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
            text=self.text,
            paths=[self._path(row) for row in range(first, len(self._tokens))],
            logits=logits,
        )

    def _path(self, row: int) -> list[int]:
        path = []
        while row >= self.text:
            path.append(row)
            row = self._parents[row]
        return path[::-1]

    def _cut(self, rows: int) -> None:
        del self._tokens[rows:], self._parents[rows:], self._positions[rows:]

    def positions(self, rows: int) -> Sequence[int]:
        """The positions of the first ``rows`` rows."""
        return self._positions[:rows]
