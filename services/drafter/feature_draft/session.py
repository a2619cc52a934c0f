"""One request's state in a drafter of hidden states: its tokens, the rows computed for them, and the target's noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.feature_draft.cache import CacheShape, RowCache
from services.drafter.feature_draft.draft_vocabulary import DraftVocabulary
from services.drafter.known_states import KnownStates
from speculation.messages import OpenSession, StepReport
from speculation.philox import NoiseStream, gumbel
from speculation.types import Features

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


class FeatureSession:
    """Implements ``SourceSession``. Row i is (embedding of token i + 1, the target's state of position i).

    A row without a state is made all the same, with the head's ``missing_state``. Should its state come later, the row is
    made once more, in its place. For a head of one layer that is exactly what it would have been; with more layers, the
    rows behind it keep what they have read of it.

    Args:
        extra: what it may draft beside the head's own vocabulary: tokens of its prompt.

    Attributes:
        tokens: all committed tokens.
        cache: its rows.
        temperature: of the target's choices.
        noise: the noise of the target's choices, if it may be known.
        sampled: whether drafts are drawn from q.
    """

    def __init__(self, message: OpenSession, shape: CacheShape, extra: DraftVocabulary | None) -> None:
        self.tokens = list(message.tokens)
        self.cache = RowCache(shape)
        self.extra = extra
        self.temperature = message.temperature
        self.noise = message.noise
        self.sampled = message.sampled and message.temperature > 0
        self._reported = False
        # Positions, ascending, of rows held that were made without a state.
        self._without: list[int] = []
        self._gumbels: dict[int, torch.Tensor] = {}

    def observe(self, report: StepReport) -> None:
        self.tokens += report.committed
        self._reported = True
        for position in [position for position in self._gumbels if position < len(self.tokens)]:
            del self._gumbels[position]

    def close(self) -> None:
        self.tokens.clear()
        self.cache.clear()
        self.extra = self.noise = None
        self._without.clear()
        self._gumbels.clear()

    def rows_wanted(self, states: KnownStates, layers: Sequence[int], missing: torch.Tensor) -> CommittedRows | None:
        """The rows to compute before a draft; None: there is nothing to draft from yet.

        Before the first step that is reported, the target may still be reading the prompt. Its states will come, so rows
        without them would be made in vain.

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
        found = [
            (run, _numbers(run, layers, missing)) for run in states.runs(asked.tolist()) if set(layers) <= set(run.layers)
        ]
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

    def gumbel(self, position: int, ids: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """[ids], the noise with which the target chooses its token for ``position``."""
        assert self.noise is not None
        found = self._gumbels.get(position)
        if found is None:
            made = gumbel(self.noise.seed, NoiseStream.CHOICE, position, ids)
            found = self._gumbels[position] = torch.from_numpy(made).to(device, torch.float32)
        return found


def _numbers(run: Features, layers: Sequence[int], missing: torch.Tensor) -> torch.Tensor:
    """[rows, state size]: the states of ``layers``, in this order."""
    numbers = torch.frombuffer(bytearray(run.data), dtype=_DTYPES[run.dtype]).view(run.rows, len(run.layers), -1)
    if tuple(layers) != run.layers:
        numbers = numbers[:, [run.layers.index(layer) for layer in layers]]
    if numbers.shape[1] * numbers.shape[2] != len(missing):
        raise ValueError(f"a state has {numbers.shape[2]} numbers per layer: the head reads {len(missing) // len(layers)}")
    return numbers.flatten(1).to(missing.device, missing.dtype)
