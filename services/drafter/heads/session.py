"""One request's state in a drafter of hidden states: the rows computed for its tokens, and those that are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from services.drafter.heads.cache import CacheShape, RowCache
from services.drafter.heads.choosing_session import ChoosingSession
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from services.machine.device_states import DeviceStates
from speculation.messages import OpenSession, StepReport
from speculation.types import Features

# A step commits a few tokens. More rows than this are a text that must be read first.
_FEW = 32
# Rows of such texts in one call: beside sessions that wait for a draft, and alone.
_BESIDE, _ALONE = 256, 1024
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedRows:
    """Rows of committed positions that are to be computed.

    Attributes:
        positions: [rows], ascending; the last one is that of the last committed token but one.
        tokens: [rows], the token after each position.
        states: [rows, state size], the target's; the head's ``missing_state`` where it is not known.
        known: [rows], whether it is.
    """

    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    states: torch.Tensor
    known: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, begin: int, end: int) -> CommittedRows:
        """Rows ``begin`` to before ``end``."""
        at = slice(begin, end)
        return CommittedRows(
            positions=self.positions[at], tokens=self.tokens[at], states=self.states[at], known=self.known[at]
        )


class FeatureSession(ChoosingSession):
    """Row i is (embedding of token i + 1, the target's state of position i).

    A row without a state is made all the same, with the head's ``missing_state``. Should its state come later, the row is
    made once more, in its place. For a head of one layer that is exactly what it would have been; with more layers, the
    rows behind it keep what they have read of it.

    Attributes:
        cache: its rows.
    """

    def __init__(self, message: OpenSession, shape: CacheShape, extra: DraftVocabulary | None) -> None:
        super().__init__(message, extra)
        self.cache = RowCache(shape)
        self._reported = False
        self._without: list[int] = []

    @property
    def without(self) -> Sequence[int]:
        """Positions, ascending, of rows held that were made without a state."""
        return self._without

    @override
    def observe(self, report: StepReport) -> None:
        super().observe(report)
        self._reported = True

    @override
    def close(self) -> None:
        super().close()
        self.cache.clear()
        self._without.clear()

    def rows_wanted(self, states: KnownStates, layers: Sequence[int], missing: torch.Tensor) -> CommittedRows | None:
        """The rows to compute before a draft; None: there is nothing to draft from yet.

        Before the first reported step, the target may still be reading the prompt. Its states will come; rows computed
        without them would be wasted.

        Args:
            missing: [state size], takes the place of a state that is not known.

        Raises:
            ValueError: a state is not as wide as the head reads it.
        """
        last = len(self.tokens) - 2
        if last < 0 or not (self._reported or states.known(last, last + 1)):
            return None
        self.cache.begin(last + 1)
        # Rows may have been dropped at the beginning, or all of them: they are made anew then.
        self._without = [position for position in self._without if self.cache.first <= position < self.cache.end]
        # The last row is computed in any case, since drafts begin there.
        asked = np.array(sorted({*self._without, *range(min(self.cache.end, last), last + 1)}), dtype=np.int64)
        runs = [run for run in states.runs(asked.tolist()) if set(layers) <= set(run.layers)]
        found = [(run, state_numbers(run, layers, missing)) for run in runs]
        known = np.zeros(len(asked), dtype=np.bool_)
        filled = missing.expand(len(asked), -1).clone()
        for run, numbers in found:
            at = np.searchsorted(asked, np.arange(run.start, run.start + run.rows))
            known[at] = True
            filled[torch.from_numpy(at)] = numbers
        # Rows that are held stay as they are, as long as their states have not come.
        wanted = np.flatnonzero(known | (asked >= self.cache.end) | (asked == last))
        positions = asked[wanted]
        return CommittedRows(
            positions=positions,
            tokens=np.array([self.tokens[position + 1] for position in positions.tolist()], dtype=np.int64),
            states=filled[torch.from_numpy(wanted)],
            known=known[wanted],
        )

    def computed(self, rows: CommittedRows) -> None:
        """Note that these rows are in the cache."""
        done = set(rows.positions[rows.known].tolist())
        new = rows.positions[~rows.known & (rows.positions >= self.cache.end)].tolist()
        self._without = [position for position in self._without if position not in done] + new
        self.cache.end = max(self.cache.end, int(rows.positions[-1]) + 1)


@dataclass(frozen=True, slots=True)
class Due:
    """A session whose draft is wanted.

    Attributes:
        place: its place in the batch.
        rows: the rows of committed positions that it needs first.
    """

    place: int
    session: FeatureSession
    rows: CommittedRows


def due_in(batch: Sequence[DraftWanted], layers: Sequence[int], missing: torch.Tensor) -> list[Due]:
    """The sessions of a batch that want a draft and have something to draft from; see ``FeatureSession.rows_wanted``.

    Raises:
        ValueError: as there.
    """
    return [
        Due(place, wanted.session, rows)
        for place, wanted in enumerate(batch)
        if wanted.max_nodes and (rows := wanted.session.rows_wanted(wanted.states, layers, missing)) is not None
    ]


class HasRows(Protocol):
    """A draft that needs rows of committed positions first."""

    @property
    def rows(self) -> CommittedRows: ...


_Draft = TypeVar("_Draft", bound=HasRows)


def in_one_call(due: Sequence[_Draft]) -> list[tuple[_Draft, CommittedRows]]:
    """The drafts whose rows one call computes, each with the part of its rows that it does.

    Few rows, as a step commits them, are computed whole. Long texts take turns, so that nobody waits long for a draft.
    """
    order = sorted(due, key=lambda each: len(each.rows))
    room = _BESIDE if len(order[0].rows) <= _FEW else _ALONE
    pieces: list[tuple[_Draft, CommittedRows]] = []
    for each in order:
        piece = each.rows
        if len(piece) > _FEW:
            piece = piece.part(0, room)
            room -= len(piece)
        if len(piece):
            pieces.append((each, piece))
    return pieces


def state_numbers(run: Features, layers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """[rows, state size]: the states of ``layers``, in this order; on the device and in the type of ``like`` [state size].

    Raises:
        ValueError: a state is not as wide as the model reads it.
    """
    data = run.data
    packed = (
        data.numbers
        if isinstance(data, DeviceStates)
        else torch.frombuffer(bytearray(bytes(data)), dtype=_DTYPES[run.dtype])
    )
    numbers = packed.view(run.rows, len(run.layers), -1)
    if tuple(layers) != run.layers:
        numbers = numbers[:, [run.layers.index(layer) for layer in layers]]
    if numbers.shape[1] * numbers.shape[2] != len(like):
        raise ValueError(f"a state has {numbers.shape[2]} numbers per layer: the head reads {len(like) // len(layers)}")
    return numbers.flatten(1).to(like.device, like.dtype)
