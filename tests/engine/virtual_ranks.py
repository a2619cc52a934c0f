"""The ranks of a stage as threads of one process, which exchange what they make through a board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from services.verifier.config import TargetConfig
from services.verifier.model.slice import ModelSlice

Made = TypeVar("Made")
_PATIENCE_S = 60.0


class Board:
    """What every rank has given last."""

    def __init__(self, count: int) -> None:
        self.given: list[torch.Tensor] = [torch.empty(0)] * count
        self.barrier = Barrier(count, timeout=_PATIENCE_S)


class OnBoard:
    """Implements ``Gathers``.

    Args:
        order: in which the ranks' parts are handed out; a planted fault if it is not ascending.
        late: a rank whose part is that of the gather before, where it has the same shape.
    """

    def __init__(self, board: Board, index: int, order: Sequence[int] | None = None, late: int | None = None) -> None:
        self._board, self._index, self._late = board, index, late
        self._order = range(len(board.given)) if order is None else order
        self._before: dict[tuple[int, ...], torch.Tensor] = {}

    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        board = self._board
        board.given[self._index] = own.clone()
        board.barrier.wait()
        made = [board.given[rank] for rank in self._order]
        board.barrier.wait()
        if self._late is not None and own.is_floating_point():
            late = made[self._late]
            made[self._late] = self._before.get(tuple(late.shape), late)
            self._before[tuple(late.shape)] = late
        return torch.stack(made)


def ranks_of(
    config: TargetConfig, order: Sequence[int] | None = None, late: int | None = None, at: Sequence[int] | None = None
) -> list[ModelSlice]:
    """All ranks of a target of one stage.

    Args:
        order, late: see ``OnBoard``.
        at: the places of the ranks on the board; a planted fault if they are not ascending.
    """
    count = config.tensor_parallel_size
    board, parts = Board(count), []
    for rank in range(count):
        part = ModelSlice(config, 0, rank=rank)
        assert part.shards is not None
        part.shards.connect(OnBoard(board, rank if at is None else at[rank], order, late))
        parts.append(part)
    return parts


def together(parts: Sequence[ModelSlice], run: Callable[[ModelSlice], Made]) -> list[Made]:
    """What every rank makes, side by side."""
    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, parts))
