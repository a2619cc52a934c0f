"""The tokens that can be chosen: exactly the set that transformers' top-k, top-p and min-p leave, without a full sort.

If rounding could decide whether a token belongs to the nucleus, the row is sorted and summed as transformers does. If that
does not decide either (equal logits on both sides of the limit), the caller asks transformers' own processors for the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.model.to_device import to_device
from speculation.types import SamplingParams

# Rows of logits folded into columns of this length; the maxima of columns tell where the greatest logits are.
_DEPTH = 64
# Relative error of a float32 operation, divided by four: sums run in four lanes or more.
LANE_ERROR = 2.0**-26
# Largest difference between a probability computed here and transformers', apart from the error of its sum.
ERROR = 3e-6
# The same for the ratio of two probabilities; generous, since it costs only a slower way.
RATIO_ERROR = 1e-5
# Below this min_p, a product of probabilities may lose digits.
LEAST_MIN_P = 1e-30


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that can be chosen, ascending, [n], and their logits divided by the temperature, [n]."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float64]


def rows_of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those ``rows`` of [rows, vocabulary]; the logits themselves if they are all, in their order."""
    return logits if rows == list(range(len(logits))) else logits[to_device(rows, logits.device)]


def truncates(params: SamplingParams, vocabulary: int) -> bool:
    """Whether top-k, top-p or min-p can exclude a token."""
    return 0 < params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0


def likeliest(logits: torch.Tensor, k: int, reader: LogitsReader = READER) -> torch.Tensor:
    """[rows, k], the ids of the ``k`` greatest of [rows, vocabulary], greatest first.

    With the vocabulary folded into columns in any way, they lie in the columns with the ``k`` greatest maxima. So the whole
    vocabulary is read only once, for the maxima.
    """
    rows, vocabulary = logits.shape
    if vocabulary % _DEPTH or vocabulary // _DEPTH < k:
        return torch.topk(logits, k, dim=-1).indices
    columns = logits.view(rows, _DEPTH, -1)
    # torch would share out even one row among its threads, who wait for each other where other processes want the cores too.
    maxima = torch.from_numpy(columns.numpy().max(1)) if reader.on_host(logits) else columns.amax(1)
    best = maxima.topk(k).indices
    found = columns.gather(2, best[:, None].expand(-1, _DEPTH, -1)).flatten(1).topk(k).indices
    return found // k * columns.shape[2] + best.gather(1, found % k)


def narrow(logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[Candidates | None]:
    """What truncation leaves of each row; None if rounding could decide, or the greatest logit is not finite.

    Args:
        logits: [rows, vocabulary], float32, divided by the temperature; on the host.
        params: [rows], each of which truncates.
    """
    vocabulary = logits.shape[1]
    tops = _tops(logits)
    cut_by_count = [0 < own.top_k < vocabulary for own in params]
    totals: list[float | None] = [None] * len(params)
    finite = [row for row, top in enumerate(tops) if math.isfinite(top)]
    with_nucleus = [row for row in finite if params[row].top_p < 1 and not cut_by_count[row]]
    for row, total in zip(with_nucleus, _totals(logits, tops, with_nucleus), strict=True):
        totals[row] = total
    bounds = [math.inf] * len(params)
    for row in finite:
        if cut_by_count[row]:
            bounds[row] = _least_of(logits[row], params[row].top_k)
        else:
            bounds[row] = _bound(params[row], tops[row], totals[row], vocabulary)
    found = _at_least(logits, bounds)
    return [
        _cut(ids, values, own, top, total, row) if math.isfinite(top) else None
        for (ids, values), own, top, total, row in zip(found, params, tops, totals, logits, strict=True)
    ]


def _tops(logits: torch.Tensor) -> list[float]:
    """The greatest logit of each row."""
    return [float(row.max()) for row in logits.numpy()]


def _totals(logits: torch.Tensor, tops: Sequence[float], rows: list[int]) -> list[float]:
    """Sum of exp(logit - greatest logit) of each of ``rows``; relative error below ``ERROR``."""
    # Row by row, so that the data stays in the CPU's cache; numpy adds pairwise.
    own, scratch = logits.numpy(), np.empty(logits.shape[1], dtype=np.float32)
    sums = []
    for row in rows:
        np.subtract(own[row], np.float32(tops[row]), out=scratch)
        sums.append(float(np.exp(scratch, out=scratch).sum()))
    return sums


def _least_of(row: torch.Tensor, k: int) -> float:
    """A lower bound on the ``k`` greatest logits of [vocabulary]."""
    vocabulary = len(row)
    if vocabulary % _DEPTH or vocabulary // _DEPTH < k:
        return float(torch.topk(row, k).values[-1])
    # The ``k`` greatest maxima are ``k`` different logits.
    maxima = row.numpy().reshape(_DEPTH, -1).max(0)
    return float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])


def _bound(params: SamplingParams, top: float, total: float | None, vocabulary: int) -> float:
    """A lower bound on the logits that top-p and min-p may leave."""
    bound = top + math.log(params.min_p) if params.min_p else -math.inf
    if total is not None:
        # Tokens below this have less probability than 1 - top_p, all together.
        bound = max(bound, top + math.log(float(np.float32(1 - params.top_p)) * total / vocabulary))
    return bound - 1e-3 - 1e-6 * abs(bound)


def _at_least(logits: torch.Tensor, bounds: Sequence[float]) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """For each row, the ids whose logits reach its bound, ascending, and these logits."""
    found = []
    for row, bound in zip(logits.numpy(), bounds, strict=True):
        ids = np.flatnonzero(row >= bound)
        found.append((ids, row[ids]))
    return found


def _cut(
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    params: SamplingParams,
    top: float,
    total: float | None,
    row: torch.Tensor,
) -> Candidates | None:
    """The exact set, from a superset; None if rounding could decide.

    Args:
        total: exp(logit - ``top``) summed over all tokens; None if top-k truncates, or top-p does not.
        row: [vocabulary], all logits.
    """
    vocabulary = len(row)
    if 0 < params.top_k < vocabulary:
        least = np.partition(values, len(values) - params.top_k)[len(values) - params.top_k]
        # Several may equal the last one.
        chosen = (values >= least) & (values > -np.inf)
        ids, values = ids[chosen], values[chosen]
    # In float32, as a softmax computes it.
    below_top = values - np.float32(top)
    chosen = np.ones(len(ids), dtype=np.bool_)
    if params.top_p < 1:
        least_below = _nucleus(below_top, params, total, vocabulary)
        if least_below is not None:
            chosen = below_top >= least_below
        else:
            least = _nucleus_by_sorting(row.numpy() if total is not None else values, params, vocabulary)
            if least is None:
                return None
            chosen = values >= least
    if params.min_p:
        limit = float(np.float32(params.min_p))
        ratio = np.exp(below_top.astype(np.float64))
        near = (np.abs(ratio - limit) <= RATIO_ERROR * limit) & (below_top < 0)
        if limit < LEAST_MIN_P or bool((near & chosen).any()):
            return None
        chosen &= ratio >= limit
    return Candidates(ids=ids[chosen], weights=values[chosen].astype(np.float64))


def _nucleus(
    below_top: NDArray[np.float32], params: SamplingParams, total: float | None, vocabulary: int
) -> np.float32 | None:
    """The least logit of the nucleus, relative to the greatest logit; None if rounding could decide.

    transformers sorts ascending and removes each token up to which the probabilities sum to at most 1 - top_p, in float32.
    """
    descending = np.sort(below_top)[::-1]
    shares = np.exp(descending.astype(np.float64))
    held = float(shares.sum())
    # A superset that top-k or min-p has cut may lie within the nucleus as a whole.
    whole = total is None or params.min_p > 0
    total = held if total is None else total
    before = (np.cumsum(shares) - shares) / total
    outside = float(np.float32(1 - params.top_p))
    size = max(1, int(np.searchsorted(before, 1 - outside)))
    # The error of a sum of ascending numbers grows with its partial sums, which are small until the likely tokens come.
    tail = max(0.0, 1 - held / total)
    error = ERROR + outside * LANE_ERROR * (vocabulary * tail + len(shares))
    if size > 1 and before[size - 1] > 1 - outside - error:
        return None
    if size < len(shares):
        if before[size] < 1 - outside + error or descending[size] == descending[size - 1]:
            return None
    elif not whole:
        return None
    return np.float32(descending[size - 1])


def _nucleus_by_sorting(values: NDArray[np.float32], params: SamplingParams, vocabulary: int) -> np.float32 | None:
    """The least logit of the nucleus, by transformers' own sums; None if equal logits lie on both sides of the limit.

    Args:
        values: all logits except those already excluded.
    """
    ascending = np.full(vocabulary, -np.inf, dtype=np.float32)
    ascending[vocabulary - len(values) :] = np.sort(values)
    sums = torch.from_numpy(ascending).softmax(-1).cumsum(-1)
    removed = min(int((sums <= 1 - params.top_p).sum()), vocabulary - 1)
    least = ascending[removed]
    return None if removed and ascending[removed - 1] == least else np.float32(least)
