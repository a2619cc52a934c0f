"""The target's hidden states at committed positions, as the verifier sent them, for sources that read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from speculation.types import Features


class KnownStates:
    """Rows of one request, by position. A row that never came or was dropped is missing; sources must mask it.

    One thread may add rows while another reads them: a reader sees a whole row or none.

    Attributes:
        size: bytes of all rows.
    """

    def __init__(self) -> None:
        self.size = 0
        self._rows: dict[int, tuple[Features, int]] = {}
        self._chunks: deque[Features] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def known(self, start: int, stop: int) -> list[int]:
        """The positions from ``start`` to before ``stop`` that have a row, ascending."""
        return [position for position in range(start, stop) if position in self._rows]

    def of(self, position: int, layers: Sequence[int]) -> Features | None:
        """One row, its ``layers`` concatenated in this order; None if the row or one of the layers is missing."""
        found = self._rows.get(position)
        return None if found is None else row_of(*found, layers)

    def runs(self, positions: Iterable[int]) -> list[Features]:
        """The rows at ``positions``, ascending, that are there; neighbours that came together are together."""
        runs: list[tuple[Features, int, int]] = []
        for position in positions:
            if (found := self._rows.get(position)) is None:
                continue
            chunk, row = found
            if runs and runs[-1][0] is chunk and runs[-1][2] == row:
                runs[-1] = (chunk, runs[-1][1], row + 1)
            else:
                runs.append((chunk, row, row + 1))
        return [chunk.part(begin, end) for chunk, begin, end in runs]

    def add(self, chunk: Features) -> None:
        """Enter a chunk's rows; later ones replace earlier ones."""
        self._chunks.append(chunk)
        self.size += len(chunk.data)
        for row in range(chunk.rows):
            self._rows[chunk.start + row] = (chunk, row)

    def drop_oldest(self) -> None:
        """Forget the chunk that came first."""
        chunk = self._chunks.popleft()
        self.size -= len(chunk.data)
        for row in range(chunk.rows):
            entry = self._rows.get(chunk.start + row)
            if entry is not None and entry[0] is chunk:
                del self._rows[chunk.start + row]


class BoundedStates:
    """The rows of all requests, at most ``max_bytes``. Beyond that, the request that holds most loses its oldest chunk.

    So a request with a very long prompt loses its own beginning, and others lose nothing.

    Attributes:
        size: bytes of all rows.
    """

    def __init__(self, max_bytes: int) -> None:
        self.size = 0
        self._max = max_bytes
        self._held: set[KnownStates] = set()

    def add(self, states: KnownStates, chunk: Features) -> None:
        """Enter a chunk of one request, and drop chunks beyond the limit."""
        states.add(chunk)
        self._held.add(states)
        self.size += len(chunk.data)
        while self.size > self._max:
            largest = max(self._held, key=lambda each: each.size)
            before = largest.size
            largest.drop_oldest()
            self.size -= before - largest.size

    def forget(self, states: KnownStates) -> None:
        """Stop counting a request's rows: its session has ended."""
        if states in self._held:
            self._held.remove(states)
            self.size -= states.size


def row_of(features: Features, row: int, layers: Sequence[int]) -> Features | None:
    """One row of ``features``, its ``layers`` concatenated in this order; None if one of them is missing."""
    return features.part(row, row + 1).of_layers(layers) if set(layers) <= set(features.layers) else None
