"""How far the drafter's next-token distribution q is from the target's p, over the draft vocabulary.

====================  ===============================================================================
``hard_ce``           -log q of p's likeliest token: Medusa's and Speculative Streaming's labels, for greedy text
``soft_ce``           -sum p log q: EAGLE's and FSPAD's token loss
``kl``                KL(p || q)
``tv``                total variation, 1 - sum min(p, q): one minus the chance that a draft is accepted
``lk``                lambda KL + (1 - lambda) TV, lambda = exp(-3 a), a = sum min(p, q) without gradient
                      (LK losses, arXiv 2602.23881): KL while little overlaps, where TV has no slope
``ce_tv``             0.1 soft_ce + 0.9 TV: DSpark's, with p in the place of the text's token
====================  ===============================================================================

p is softmax(rows · state of the target) over the same rows, so renormalised to the draft vocabulary. Nothing as wide as the
vocabulary outlives a chunk of rows: the slope with respect to the logits has a closed form, and is multiplied by the output
rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from training.recipe import RecipeBase

_CE_SHARE = 0.1
# Rows of a matrix product, and rows whose distributions are compared at once: on a CPU these should stay in its cache.
_CHUNK, _CACHED = 512, 16
_ETA = 3.0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """HASS's top-k loss (arXiv 2408.15766, section 3.1), which is added: -sum p log q over p's ``count`` likeliest tokens.

    Attributes:
        weight: of the sum.
    """

    count: int
    weight: float


@dataclass(frozen=True, slots=True)
class Compared:
    """What comparing two distributions gave, for each row.

    Attributes:
        value: [rows] the divergence; gradients flow through it.
        overlap: [rows] sum min(p, q) over the draft vocabulary: the chance that a token drawn from q is accepted.
    """

    value: torch.Tensor
    overlap: torch.Tensor


def divergence(
    name: str, p_logits: torch.Tensor, q_logits: torch.Tensor, top: TopTokens | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A divergence of distributions given as logits, float32 [rows, V_d].

    Args:
        top: what is added for p's likeliest tokens.

    Returns:
        its value [rows], its slope with respect to ``q_logits`` [rows, V_d], and the overlap [rows].
    """
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    likely = None if top is None else _top_tokens(top, p, q, log_q)
    value, slope = _plain(name, p_logits, log_p, log_q, p, q, overlap)
    return (value, slope, overlap) if likely is None else (value + likely[0], slope.add_(likely[1]), overlap)


def _top_tokens(top: TopTokens, p: torch.Tensor, q: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chances, at = p.topk(top.count, dim=-1)
    value = -top.weight * (chances * log_q.gather(-1, at)).sum(-1)
    slope = q * chances.sum(-1, keepdim=True)
    return value, slope.scatter_add_(-1, at, -chances).mul_(top.weight)


def _plain(
    name: str,
    p_logits: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    overlap: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence itself and its slope; the logarithms are used up."""
    if name == "tv":
        return 1 - overlap, _tv_slope(p, q)
    if name == "hard_ce":
        best = p_logits.argmax(-1, keepdim=True)
        return -log_q.gather(-1, best).squeeze(-1), q.scatter_add(-1, best, -torch.ones_like(q))
    slope = q - p
    if name in ("soft_ce", "ce_tv"):
        value = -log_q.mul_(p).sum(-1)
        if name == "soft_ce":
            return value, slope
        value = _CE_SHARE * value + (1 - _CE_SHARE) * (1 - overlap)
        return value, slope.mul_(_CE_SHARE).add_(_tv_slope(p, q), alpha=1 - _CE_SHARE)
    value = log_p.sub_(log_q).mul_(p).sum(-1)
    if name == "lk":
        share = torch.exp(-_ETA * overlap)
        value = share * value + (1 - share) * (1 - overlap)
        slope = slope.mul_(share[:, None]).addcmul_(_tv_slope(p, q), 1 - share[:, None])
    return value, slope


def _tv_slope(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of 1 - sum min(p, q), through the softmax that made q: q (m - [q < p]), m = sum of q where q < p."""
    smaller = q.clone().lt_(p).mul_(q)
    return (q * smaller.sum(-1, keepdim=True)).sub_(smaller)


def compare(
    name: str,
    hidden: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    *,
    own: torch.Tensor | None = None,
    top: TopTokens | None = None,
) -> Compared:
    """Compare q = softmax(rows · hidden) with p = softmax(rows · states).

    Args:
        hidden: [n, h] what the drafter gives to the output layer.
        states: [n, h] what the target gave to it; no gradient.
        rows: [V_d, h] the target's output rows of the draft vocabulary; frozen. All products are made in their dtype.
        own: [V_d, k] the drafter's own output rows, which are trained. They read the last k numbers of ``hidden``, [n, h or
            0 + k], and the target's rows what stands before these.
        top: as in ``divergence``.
    """
    value, overlap = _Compare.apply(hidden, states, rows, own, name, top)  # type: ignore[no-untyped-call]
    return Compared(value=value, overlap=overlap)


def output_rows(rows: torch.Tensor, own: torch.Tensor | None, width: int) -> torch.Tensor:
    """[V_d, width], all that a drafter's ``hidden`` of this width is multiplied by; see ``compare``."""
    if own is None:
        return rows
    return own.to(rows.dtype) if own.shape[1] == width else torch.cat((rows, own.to(rows.dtype)), dim=1)


class _Compare(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        states: torch.Tensor,
        rows: torch.Tensor,
        own: torch.Tensor | None,
        name: str,
        top: TopTokens | None,
    ) -> Any:
        ctx.dtype = hidden.dtype
        values = torch.empty(len(hidden), device=hidden.device)
        overlaps = torch.empty_like(values)
        weighted = torch.empty(hidden.shape, device=hidden.device)
        # Only the slopes of rows that are trained themselves outlive a chunk.
        kept = None if own is None else rows.new_empty(len(hidden), len(rows))
        # The dtypes are chosen here, not by autocast.
        with torch.autocast(hidden.device.type, enabled=False):
            given, made = states.to(rows.dtype), hidden.to(rows.dtype)
            drafted = output_rows(rows, own, hidden.shape[1])
            for start in range(0, len(hidden), _CHUNK):
                part = slice(start, start + _CHUNK)
                p_logits, q_logits = given[part] @ rows.T, made[part] @ drafted.T
                slopes = torch.empty_like(q_logits)
                cached = _CACHED if hidden.device.type == "cpu" else _CHUNK
                for first in range(0, len(q_logits), cached):
                    few = slice(first, first + cached)
                    value, slope, overlap = divergence(name, p_logits[few].float(), q_logits[few].float(), top)
                    slopes[few] = slope
                    values[part][few] = value
                    overlaps[part][few] = overlap
                weighted[part] = slopes @ drafted
                if kept is not None:
                    kept[part] = slopes
        if own is None:
            ctx.save_for_backward(weighted)
        else:
            ctx.save_for_backward(weighted, kept, made[:, -own.shape[1] :])
        ctx.mark_non_differentiable(overlaps)
        return values, overlaps

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weighted, *trained = ctx.saved_tensors
        given, own = gradients[0][:, None], None
        if trained:
            slopes, made = trained
            with torch.autocast(made.device.type, enabled=False):
                own = ((slopes * given).to(made.dtype).T @ made).float()
        return (weighted * given).to(ctx.dtype), None, None, own, None, None


class OverVocabulary:
    """A learner's part that knows the target's output rows, and the draft vocabulary's among them.

    Args:
        output: [V, h] all of the target's output rows.
        ids: int64 [V_d].

    Attributes:
        rows: [V_d, h], the output rows of the draft vocabulary.
    """

    def __init__(self, output: torch.Tensor, ids: torch.Tensor, recipe: RecipeBase) -> None:
        self.rows = output[ids]
        self.ids = ids
        self._output = output
        self._dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
        self._product_rows = self.rows.to(self._dtype)
        # [V], whether a token is in the draft vocabulary.
        self._held = torch.zeros(len(output), dtype=torch.bool, device=output.device)
        self._held[ids] = True

    @property
    def own_rows(self) -> torch.Tensor | None:
        """See ``Learner``."""
        return None


# Rows at a time: what is as wide as the vocabulary stays small.
_CHOSEN_AT_ONCE = 128


class TargetChoices:
    """Computed where it is asked for, and kept.

    Args:
        output: [V, h] all of the target's output rows.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self._output = output
        self._norms = torch.empty(0, device=output.device)
        self._best = torch.empty(0, dtype=torch.int64, device=output.device)

    @torch.no_grad()
    def at(self, positions: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each position, the logarithm of the sum of its exponentiated logits, and the likeliest token.

        Args:
            positions: int64 [n], numbers within the batch.
            states: [n, h], the target's at these positions.
        """
        missing = int(positions.max()) + 1 - len(self._best) if len(positions) else 0
        if missing > 0:
            self._norms = torch.cat((self._norms, self._norms.new_zeros(missing)))
            self._best = torch.cat((self._best, self._best.new_full((missing,), -1)))
        new = self._best[positions] < 0
        for rows, wanted in zip(
            torch.split(states[new], _CHOSEN_AT_ONCE), torch.split(positions[new], _CHOSEN_AT_ONCE), strict=True
        ):
            logits = rows.float() @ self._output.T
            self._norms[wanted] = logits.logsumexp(-1)
            self._best[wanted] = logits.argmax(-1)
        return self._norms[positions], self._best[positions]
