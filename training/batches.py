"""Which sequences each optimiser step reads, and the rows that they become.

Every order and every random number is a function of the recipe's seed and the number of the epoch or step, so a run that was
interrupted goes on as if it had not been. Data may grow while a model trains: an epoch has the sequences that were there
when it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from training.recipe import RecipeBase, UnrolledRecipe
from training.shards import TrainingSequence

# Independent streams of random numbers.
_ORDER, _MASKS = 1, 2
# The length of text for which papers state the width of their noise.
_NOISE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the data a run is.

    Attributes:
        sequences: number of sequences of this epoch.
        offset: how many of them have been read.
    """

    epoch: int = 0
    sequences: int = 0
    offset: int = 0


def next_batch(place: Place, lengths: Sequence[int], recipe: RecipeBase) -> tuple[list[int], Place]:
    """Indices of the sequences of the next step, at least ``batch_rows`` tokens together, and the place behind them."""
    found: list[int] = []
    rows = 0
    while rows < recipe.batch_rows:
        if place.offset == place.sequences:
            first = place.sequences == 0
            place = Place(epoch=place.epoch + (not first), sequences=len(lengths))
        order = np.random.default_rng((recipe.seed, _ORDER, place.epoch)).permutation(place.sequences)
        for index in order[place.offset :].tolist():
            found.append(index)
            rows += min(lengths[index], recipe.max_rows)
            place = Place(place.epoch, place.sequences, place.offset + 1)
            if rows >= recipe.batch_rows:
                break
    return found, place


def micro_batches(indices: Sequence[int], lengths: Sequence[int], recipe: RecipeBase) -> Iterator[list[int]]:
    """Cut a batch into parts of about ``micro_rows`` tokens, of sequences of similar lengths."""
    part: list[int] = []
    rows = 0
    for index in sorted(indices, key=lambda index: (lengths[index], index)):
        length = min(lengths[index], recipe.max_rows)
        if part and rows + length > recipe.micro_rows:
            yield part
            part, rows = [], 0
        part.append(index)
        rows += length
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence within a batch.

    Row t of a sequence is drafter row t: it holds the embedding of token t + 1 and the state of position t, and predicts
    token t + 2 (services/drafter/heads/eagle/head.py).

    Attributes:
        start: its first row.
        answer: the first row whose prediction a drafter is asked for; the rows before it are context.
        stop: behind its last row.
    """

    start: int
    answer: int
    stop: int


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of several sequences, one after the other. N tokens give fewer rows: the last two predict nothing.

    Attributes:
        spans: where the sequences' rows are.
        token: int64 [rows], index of each row's position in the arrays of N.
        tokens: int64 [N].
        states: float32 [N, width], the target's, see ``StateColumns``.
        known: bool [N], whether the state is there.
        inputs: float32 [rows, width], states with noise.
        missing: bool [rows], whether the row's input state is replaced by the one for missing states.
        positions: int64 [rows].
        last: int64 [rows], index of the last token of the row's sequence.
    """

    spans: tuple[Span, ...]
    token: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor
    known: torch.Tensor
    inputs: torch.Tensor
    missing: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor

    def ahead(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For unrolled step ``step`` of every row: the token it reads, the index of the state it should predict, and whether
        that state and the next token exist."""
        at = self.token + 1 + step
        inside = at < self.last
        at = torch.minimum(at, self.last)
        return self.tokens[at], at, inside & self.known[at]

    def label(self, step: int) -> torch.Tensor:
        """int64 [rows]: the token that step ``step`` predicts; the sequence's last one where there is none."""
        return self.tokens[torch.minimum(self.token + 2 + step, self.last)]


def randomness(recipe: RecipeBase, step: int, part: int) -> np.random.Generator:
    """The random numbers of one part of one step's batch."""
    return np.random.default_rng((recipe.seed, _MASKS, step, part))


def head_rows(
    sequences: Sequence[TrainingSequence],
    most: int,
    device: torch.device,
    recipe: UnrolledRecipe | None = None,
    random: np.random.Generator | None = None,
) -> HeadRows | None:
    """The rows of some sequences.

    Args:
        most: tokens of a sequence that are read, from its end.
        recipe, random: leave out states and add noise, as the recipe says. None: all states, without noise.

    Returns:
        None: no sequence is long enough to predict anything.
    """
    spans: list[Span] = []
    parts: list[tuple[NDArray[np.int64 | np.bool_], ...]] = []
    states: list[NDArray[np.float32]] = []
    inputs: list[NDArray[np.float32]] = []
    rows = tokens = 0
    for sequence in sequences:
        first = max(0, len(sequence.tokens) - most)
        answer = max(first, sequence.prompt_length - 1)
        if recipe is not None and random is not None and random.random() < recipe.answer_only:
            first = answer
        read, known = sequence.tokens[first:].astype(np.int64), sequence.known[first:]
        state = sequence.states[first:].astype(np.float32)
        state[~known] = 0
        count = len(read) - 2
        if count <= answer - first:
            continue
        missing, noisy = ~known[:count], state[:count]
        if recipe is not None and random is not None:
            missing = missing | (random.random(count) < recipe.missing_rows)
            width = recipe.noise * _NOISE_ROWS / len(read)
            noisy = noisy + (random.random(noisy.shape, dtype=np.float32) - 0.5) * np.float32(width)
        place = np.arange(count, dtype=np.int64)
        parts.append(
            (tokens + place, read, known, missing, first + place, np.full(count, tokens + len(read) - 1, dtype=np.int64))
        )
        spans.append(Span(rows, rows + answer - first, rows + count))
        states.append(state)
        inputs.append(noisy)
        rows, tokens = rows + count, tokens + len(read)
    if not spans:
        return None
    joined = [torch.from_numpy(np.concatenate(each)).to(device) for each in zip(*parts, strict=True)]
    token, read_tokens, is_known, is_missing, positions, last = joined
    return HeadRows(
        spans=tuple(spans),
        token=token,
        tokens=read_tokens,
        states=torch.from_numpy(np.concatenate(states)).to(device),
        known=is_known.bool(),
        inputs=torch.from_numpy(np.concatenate(inputs)).to(device),
        missing=is_missing.bool(),
        positions=positions,
        last=last,
    )
