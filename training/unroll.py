"""Runs a head on its own states, as drafting does, for every position of a text at once.

Step 0 reads the target's states: row t sees the rows up to t of its sequence. At step i row t stands at position t + i and
reads token t + 1 + i and the state that row t gave at step i - 1. It sees the rows of step 0 up to t, and of the steps 1 to
i
only its own: what a drafter's cache holds after i drafted tokens (EAGLE-3, arXiv 2503.01840, "training-time test").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.drafter.heads.eagle.head import FeatureHead
from training.batches import HeadRows, Span


class UnrolledAttention:
    """The attention of one batch. Steps after the first are computed for the answers' rows alone.

    Called with queries [1, heads, rows, d], keys and values [1, key-value heads, rows, d], turned by their positions.
    """

    def __init__(self, spans: tuple[Span, ...], window: int | None = None) -> None:
        self._spans = spans
        self._window = window
        self._context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._own: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """What each row's query finds: [1, heads, rows, d]."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        if layer not in self._context:
            self._context[layer] = key, value
            return torch.cat([self._causal(query, key, value, span) for span in self._spans], dim=2)
        own = self._own.setdefault(layer, [])
        own.append((key, value))
        found, first = [], 0
        for span in self._spans:
            rows = slice(first, first + span.stop - span.answer)
            found.append(self._later(query[:, :, rows], layer, span, rows))
            first = rows.stop
        return torch.cat(found, dim=2)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span) -> torch.Tensor:
        part = slice(span.start, span.stop)
        query, key, value = query[:, :, part], key[:, :, part], value[:, :, part]
        count = span.stop - span.start
        if self._window is None or count <= self._window:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self._seen(span, 0, 0, query.device))

    def _later(self, query: torch.Tensor, layer: int, span: Span, rows: slice) -> torch.Tensor:
        key, value = (part[:, :, span.start : span.stop] for part in self._context[layer])
        own = [(key[:, :, rows], value[:, :, rows]) for key, value in self._own[layer]]
        seen = self._seen(span, span.answer - span.start, len(own), query.device)
        scores = (query @ key.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        weights = torch.cat([scores, *((query * each).sum(-1, keepdim=True) for each, _ in own)], dim=-1)
        weights = (weights.float() * query.shape[-1] ** -0.5).softmax(dim=-1).to(query.dtype)
        found: torch.Tensor = weights[..., : key.shape[2]] @ value
        for index, (_, each) in enumerate(own):
            found = found + weights[..., key.shape[2] + index, None] * each
        return found

    def _seen(self, span: Span, first: int, steps: int, device: torch.device) -> torch.Tensor:
        """[queries, keys]: which rows of step 0 the rows from ``first`` on see, ``steps`` steps later."""
        count = span.stop - span.start
        rows, keys = torch.arange(first, count, device=device)[:, None], torch.arange(count, device=device)
        seen: torch.Tensor = keys <= rows
        return seen if self._window is None else seen & (keys > rows + steps - self._window)


@dataclass(frozen=True, slots=True)
class UnrolledStep:
    """What one step gave for the answers' rows.

    Attributes:
        rows: int64 [n], their indices among all rows.
        hidden: [n, h], what the output layer reads.
        state: [n, h], what is fed back.
    """

    rows: torch.Tensor
    hidden: torch.Tensor
    state: torch.Tensor


def unroll(head: FeatureHead, rows: HeadRows, steps: int, detach: bool = True) -> Iterator[UnrolledStep]:
    """Run a head for ``steps`` steps.

    Args:
        detach: no gradient flows through the states fed back.
    """
    attend = UnrolledAttention(rows.spans, head.config.window)
    device = rows.inputs.device
    answers = torch.cat([torch.arange(span.answer, span.stop, device=device) for span in rows.spans])
    tokens, _, _ = rows.ahead(0)
    read = rows.inputs[:, : head.config.state_size]
    inputs = torch.where(rows.missing[:, None], head.missing_state, read)
    output = head(head.embed(tokens)[None], head.fuse(inputs)[None], rows.positions[None], attend)
    hidden, state = output.hidden[0, answers], output.state[0, answers]
    yield UnrolledStep(answers, hidden, state)
    for step in range(1, steps):
        tokens, _, _ = rows.ahead(step)
        fed = state.detach() if detach else state
        output = head(head.embed(tokens[answers])[None], fed[None], (rows.positions[answers] + step)[None], attend)
        hidden, state = output.hidden[0], output.state[0]
        yield UnrolledStep(answers, hidden, state)
