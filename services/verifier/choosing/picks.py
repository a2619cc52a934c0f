"""One token for each prepared row: the greatest logit, or the greatest sum of logit and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVarTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.choosing.candidates import Candidates, narrow, rows_of, truncates
from services.verifier.choosing.device_choice import drawn
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.choosing.walks import ChoicePoint, RequestState, TokenOrError
from services.verifier.model.target_port import NOT_CHOSEN
from speculation.choose import choose
from speculation.philox import NoiseStream, gumbels
from speculation.types import SamplingParams

_Arguments = TypeVarTuple("_Arguments")


def truncated(row: torch.Tensor, request: RequestState) -> torch.Tensor:
    """[vocabulary], on the CPU: a prepared row after transformers' own top-k, top-p and min-p."""
    return row.cpu() if request.truncation is None else request.truncation(row.cpu(), ())


def by_law(
    point: ChoicePoint, process: Callable[[Unpack[_Arguments]], torch.Tensor], *arguments: *_Arguments
) -> TokenOrError:
    """The choice of speculation/choose.py from the row that ``process`` returns."""
    params = point.request.params
    try:
        return choose(process(*arguments), params, params.seed, point.position)
    except Exception as error:
        return error


def unchanged(
    logits: torch.Tensor,
    points: Sequence[ChoicePoint],
    likeliest: Callable[[], list[int]] | None = None,
    reader: LogitsReader = READER,
) -> list[TokenOrError]:
    """The greatest logit at each point of [rows, vocabulary], for requests that change no logits.

    Args:
        likeliest: gives ``reader.likeliest_of`` the logits; None: it is not known yet.
    """
    if not reader.on_host(logits):
        if likeliest is None:
            return argmax(rows_of(logits, [point.row for point in points]), points, reader)
        tokens = likeliest()
        return [
            by_law(point, _on_host, logits, point.row) if tokens[point.row] == NOT_CHOSEN else tokens[point.row]
            for point in points
        ]
    # As the law, without an array for every row.
    own, choices = logits.numpy(), []
    for point in points:
        row = own[point.row]
        best = int(row.argmax())
        usable = -math.inf < row.item(best) < math.inf
        choices.append(best if usable else by_law(point, logits.select, 0, point.row))
    return choices


def argmax(logits: torch.Tensor, points: Sequence[ChoicePoint], reader: LogitsReader = READER) -> list[TokenOrError]:
    """The greatest logit of each row, the first of equals."""
    if reader.on_host(logits):
        return [by_law(point, row.cpu) for row, point in zip(logits, points, strict=True)]
    return [
        by_law(point, row.cpu) if token == NOT_CHOSEN else token
        for token, row, point in zip(reader.likeliest_of(logits), logits, points, strict=True)
    ]


def _on_host(logits: torch.Tensor, row: int) -> torch.Tensor:
    return logits[row].cpu()


def sample(logits: torch.Tensor, points: Sequence[ChoicePoint], reader: LogitsReader = READER) -> list[TokenOrError]:
    """Gumbel-max over the tokens of each row that can win."""
    if not reader.on_host(logits):
        tokens = drawn(logits, [point.request.params for point in points], [point.position for point in points])
        return [
            by_law(point, truncated, row, point.request) if token == NOT_CHOSEN else token
            for token, row, point in zip(tokens, logits, points, strict=True)
        ]
    candidates = _candidates(logits, points, [point.request.params for point in points])
    choices: list[TokenOrError] = []
    narrowed = []
    for at, (found, row, point) in enumerate(zip(candidates, logits, points, strict=True)):
        if found is None:
            choices.append(by_law(point, truncated, row, point.request))
        elif len(found.ids) == 1:
            # A single candidate wins under any noise.
            choices.append(int(found.ids[0]))
        else:
            choices.append(NOT_CHOSEN)
            narrowed.append((at, found))
    if narrowed:
        noisy = _noisy([(points[at], found) for at, found in narrowed])
        for (at, found), values in zip(narrowed, noisy, strict=True):
            choices[at] = int(found.ids[int(values.argmax())])
    return choices


def _candidates(
    scaled: torch.Tensor, points: Sequence[ChoicePoint], params: Sequence[SamplingParams]
) -> list[Candidates | None]:
    """For each row, the tokens that truncation leaves; None if the law must be asked, as for rows that nothing truncates."""
    found: list[Candidates | None] = [None] * len(points)
    cut = [at for at, own in enumerate(params) if truncates(own, scaled.shape[1])]
    for at, own in zip(cut, narrow(_some(scaled, cut), [params[at] for at in cut]) if cut else (), strict=True):
        found[at] = own
    return found


def _some(rows: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    return rows if len(wanted) == len(rows) else rows[wanted]


def _noisy(open_points: Sequence[tuple[ChoicePoint, Candidates]]) -> list[NDArray[np.float64]]:
    """The candidates' logits plus the law's noise, which is computed for all of them at once."""
    sizes = [len(found.ids) for _, found in open_points]
    seeds = np.repeat(np.array([point.request.params.seed for point, _ in open_points], dtype=np.uint64), sizes)
    positions = np.repeat(np.array([point.position for point, _ in open_points], dtype=np.int64), sizes)
    ids = np.concatenate([found.ids for _, found in open_points])
    weights = np.concatenate([found.weights for _, found in open_points])
    noisy = weights + gumbels(seeds, NoiseStream.CHOICE, positions, ids)
    return np.split(noisy, np.cumsum(sizes)[:-1])
