"""Sampling parameters as one function on logits, built from transformers' own logits processors.

Order as in transformers' ``generate``: bias, penalties, minimum length, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculation.choose import LogitsPipeline
from speculation.types import SamplingParams

_Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build_pipeline(params: SamplingParams, *, prompt_length: int, stop_ids: frozenset[int]) -> LogitsPipeline | None:
    """The pipeline of ``params``; None where it would change nothing.

    Args:
        stop_ids: tokens that ``min_tokens`` keeps from being chosen.
    """
    steps: list[_Step] = []
    if params.logit_bias:
        steps.append(_LogitBias(params))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        steps.append(_CountPenalty(params, prompt_length))
    if params.min_tokens:
        steps.append(_MinTokens(params.min_tokens, prompt_length, stop_ids))
    if params.temperature > 0:
        steps += _warpers(params)
    return _Pipeline(steps) if steps else None


def _warpers(params: SamplingParams) -> list[_Step]:
    steps: list[_Step] = []
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps


class _Pipeline:
    """See ``LogitsPipeline``."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = LogitsProcessorList(steps)

    def __call__(self, logits: torch.Tensor, history: Sequence[int]) -> torch.Tensor:
        input_ids = torch.tensor([history], dtype=torch.long)
        processed: torch.Tensor = self._steps(input_ids, logits[None].float())
        return processed[0]


class _LogitBias:
    def __init__(self, params: SamplingParams) -> None:
        self._ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(-1, self._ids, self._values[None])


class _CountPenalty:
    """OpenAI's presence and frequency penalties: over the answer only, not over the prompt."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self._params = params
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, counts = torch.unique(input_ids[0, self._prompt_length :], return_counts=True)
        penalty = self._params.presence_penalty + self._params.frequency_penalty * counts.to(scores.dtype)
        return scores.index_add(-1, ids, -penalty[None])


class _MinTokens:
    def __init__(self, min_tokens: int, prompt_length: int, stop_ids: frozenset[int]) -> None:
        self._until = prompt_length + min_tokens
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self._until:
            return scores
        return scores.index_fill(-1, self._stop_ids, float("-inf"))
