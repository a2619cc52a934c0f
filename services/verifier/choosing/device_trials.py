"""The rejection rule's coins and draws, computed on the logits' device. Only a few numbers of a row come to the host.

``speculation.rejection.DraftTrial`` is the law. What is found here is what it says however sums and logarithms are rounded.
For the rest, ``None`` or ``NOT_CHOSEN``, it is asked itself, with the row's distribution on the host.

Errors are carried along as one number for each row: ``reach``, how far p may be from the law's, summed over all tokens. A
rejection leaves norm([p - q]+): with T its sum before it is normalised, the reach grows by 2 / T. All tokens that neither q
nor rounding touches keep their proportions exactly, so that only touched ones are in doubt when a token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from services.verifier.choosing.device_choice import SLACK, limits_of, rows_at_once, winners_on
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.model.target_port import NOT_CHOSEN, Tried
from services.verifier.model.to_device import to_device
from speculation.philox import NoiseStream, uniforms
from speculation.tree import children
from speculation.types import SamplingParams, TokenTree

# Far above the error of a sum over a vocabulary in float64.
_ROUNDING = 1e-10


class Fan(NamedTuple):
    """A row's children in the order in which they are tried: their tokens, and the q of each, by token id."""

    tokens: tuple[int, ...]
    proposals: tuple[dict[int, float], ...]


class _Left(NamedTuple):
    """What is left of the target's distributions after rejections.

    Attributes:
        p: [rows, vocabulary], float64, each with sum 1.
        touched: [rows, vocabulary], whether a token's share of the untouched ones may differ from the law's.
        reach: [rows], float64; infinite where nothing is known.
    """

    p: torch.Tensor
    touched: torch.Tensor
    reach: torch.Tensor


def fans_of(tree: TokenTree) -> list[Fan]:
    """Those of the pending token and of every node."""
    below = children(tree)
    return [_fan(tree, below.get(node, [])) for node in range(-1, len(tree))]


def _fan(tree: TokenTree, siblings: Sequence[int]) -> Fan:
    tokens = tuple(tree.tokens[child] for child in siblings)
    if not tree.proposals:
        return Fan(tokens, tuple({token: 1.0} for token in tokens))
    proposals = [tree.proposals[child] for child in siblings]
    totals = [sum(own.probabilities) for own in proposals]
    return Fan(
        tokens,
        tuple(
            {token: q / total for token, q in zip(own.token_ids, own.probabilities, strict=True)}
            for own, total in zip(proposals, totals, strict=True)
        ),
    )


def tried_on(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    fans: Sequence[Fan],
    reader: LogitsReader = READER,
) -> list[Tried]:
    """What the rule says of each row.

    Args:
        logits: [rows, vocabulary], float32, penalised, barred and divided by the temperature; on any device.
        params, positions, fans: [rows].
    """
    found: list[Tried] = []
    some = rows_at_once(logits.shape[1])
    for start in range(0, len(logits), some):
        part = slice(start, start + some)
        found += _tried(logits[part], params[part], positions[part], fans[part], reader)
    return found


def _tried(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    fans: Sequence[Fan],
    reader: LogitsReader,
) -> list[Tried]:
    left, ratios, margins = _target(logits, params, reader), [], []
    for ordinal in range(max(len(fan.tokens) for fan in fans)):
        rows = [row for row, fan in enumerate(fans) if len(fan.tokens) > ordinal]
        ratio, margin = _reject(left, rows, fans, ordinal)
        ratios.append(ratio)
        margins.append(margin)
    drawn = _drawn(left, [own.seed for own in params], positions)
    # Doubles hold ids exactly; one copy for all.
    numbers = torch.stack([drawn.double(), *ratios, *margins], dim=-1).tolist()
    return [
        Tried(_coins(made[1 : 1 + len(fan.tokens)], made[1 + len(ratios) :], own.seed, position), int(made[0]))
        for made, fan, own, position in zip(numbers, fans, params, positions, strict=True)
    ]


def _coins(ratios: Sequence[float], margins: Sequence[float], seed: int, position: int) -> tuple[bool | None, ...]:
    """As ``SeededRandomness.coin``; None within a margin, and where numbers are none."""
    drawn = uniforms(seed, NoiseStream.ACCEPT, position, np.arange(len(ratios))).tolist() if ratios else []
    return tuple(
        True if coin < ratio - margin else False if coin > ratio + margin else None
        for coin, ratio, margin in zip(drawn, ratios, margins, strict=False)
    )


def _target(logits: torch.Tensor, params: Sequence[SamplingParams], reader: LogitsReader) -> _Left:
    """Before any rejection. At temperature 0 all of p is on the greatest logit."""
    tops, limits = logits.amax(-1, keepdim=True).double(), limits_of(logits, params)
    weights = (logits.double() - tops).exp().masked_fill(logits < limits.perhaps[:, None], 0.0)
    p = weights / weights.sum(-1, keepdim=True)
    touched = (p > 0) & (logits < limits.surely[:, None])
    reach = 2 * (p * touched).sum(-1) + _ROUNDING
    greedy = to_device([own.temperature == 0 for own in params], logits.device)
    best = reader.first_of_greatest(logits).clamp(min=0)[:, None]
    p = torch.where(greedy[:, None], torch.zeros_like(p).scatter_(-1, best, 1.0), p)
    reach = torch.where(greedy, _ROUNDING, reach)
    return _Left(p, touched & ~greedy[:, None], torch.where(torch.isfinite(tops[:, 0]), reach, torch.inf))


def _reject(left: _Left, rows: Sequence[int], fans: Sequence[Fan], ordinal: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Reject one child of each of ``rows``, in place.

    Args:
        rows: those that have such a child.

    Returns:
        p / q of the child's token before that, and how far it may be off: [all rows] each, NaN where there is no such child.
    """
    device, vocabulary = left.p.device, left.p.shape[1]
    entries = [(at, token, q) for at, row in enumerate(rows) for token, q in fans[row].proposals[ordinal].items()]
    of, ids, values = zip(*entries, strict=True)
    at = to_device(rows, device)
    q = torch.zeros(len(rows), vocabulary, dtype=torch.float64, device=device)
    q[to_device(of, device), to_device(ids, device)] = to_device(values, device, torch.float64)
    own = to_device([fans[row].tokens[ordinal] for row in rows], device)[:, None]
    p, reach, q_own = left.p[at], left.reach[at], q.gather(-1, own)[:, 0]
    numbers = left.reach.new_full((2, len(left.p)), torch.nan)
    numbers[0, at] = p.gather(-1, own)[:, 0] / q_own
    numbers[1, at] = reach / q_own + _ROUNDING
    rest = (p - q).clamp_(min=0)
    total = rest.sum(-1)
    left.p[at] = rest / total[:, None]
    left.reach[at] = torch.where(total > reach, 2 * reach / total + _ROUNDING, torch.inf)
    left.touched[at] |= q > 0
    return numbers[0], numbers[1]


def _drawn(left: _Left, seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """[rows], int64: as ``SeededRandomness.draw``; ``NOT_CHOSEN`` where rounding could decide."""
    # Relative to the untouched tokens, a touched one may be off by its own error and by that of the sum of all.
    doubt = 2 * left.reach[:, None] * left.touched
    most = (left.p + doubt).log()
    nothing = most.new_full((len(most),), -torch.inf)
    best, ids, others = winners_on(most.device)(most, nothing, seeds, positions, NoiseStream.RESIDUAL)
    at = ids[:, None]
    own = (most.gather(-1, at) - (left.p.gather(-1, at) - doubt.gather(-1, at)).log())[:, 0]
    # Written so that NaN counts as undecided.
    leads = best - own - others > SLACK * (1 + best.abs())
    return torch.where(leads & torch.isfinite(best) & torch.isfinite(left.reach), ids, NOT_CHOSEN)
