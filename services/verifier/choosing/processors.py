"""Sampling parameters and a model's own processors as one function on logits, built from transformers' own.

The order is that of transformers' ``generate``. Steps that ``generate`` does not have stand beside the most similar one: the
bias of tokens before that of sequences, the counted penalties after the repetition penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from services.model_files.generation_config import ModelProcessors
from services.verifier.choosing.barring import bar
from services.verifier.model.target_port import PackedBits
from speculation.types import SamplingParams

_Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_NONE = ModelProcessors()
# Logarithm of the greatest factor of a logit; a float32 holds the product.
_MOST_DECAY = 60.0


def build_pipeline(
    params: SamplingParams, *, prompt_length: int, stop_ids: frozenset[int], model: ModelProcessors = _NONE
) -> LogitsPipeline | None:
    """The pipeline of ``params``; None if it would change nothing.

    Args:
        stop_ids: tokens that ``min_tokens`` keeps from being chosen.
        model: what the model's generation config adds, unless the request ignores it.
    """
    if params.ignore_generation_config:
        model = _NONE
    steps = [*_penalties(params, model, prompt_length), *_bounds(params, model, prompt_length, stop_ids)]
    last = _warpers(params, model) if params.temperature > 0 else []
    if model.renormalize_logits:
        last.append(LogitNormalization())
    return LogitsPipeline(steps, last) if steps or last else None


def build_truncation(params: SamplingParams) -> LogitsPipeline | None:
    """Top-k, top-p and min-p alone, for logits already divided by the temperature; None if ``params`` ask for none."""
    steps = _warpers(replace(params, temperature=1.0), _NONE) if params.temperature > 0 else []
    return LogitsPipeline([], steps) if steps else None


def _penalties(params: SamplingParams, model: ModelProcessors, prompt_length: int) -> list[_Step]:
    """Steps that depend on the tokens of prompt and answer, and biases."""
    steps: list[_Step] = []
    if params.logit_bias:
        steps.append(_LogitBias(params))
    if model.sequence_bias:
        steps.append(SequenceBiasLogitsProcessor([[list(ids), bias] for ids, bias in model.sequence_bias]))
    if (penalty := model.encoder_repetition_penalty) != 1:
        steps.append(_OfPrompt(lambda prompt: EncoderRepetitionPenaltyLogitsProcessor(penalty, prompt), prompt_length))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        steps.append(_CountPenalty(params, prompt_length))
    if model.no_repeat_ngram_size:
        steps.append(NoRepeatNGramLogitsProcessor(model.no_repeat_ngram_size))
    if size := model.encoder_no_repeat_ngram_size:
        steps.append(_OfPrompt(lambda prompt: EncoderNoRepeatNGramLogitsProcessor(size, prompt), prompt_length))
    # As in transformers, a single end-of-text token is no bad word.
    if bad := [list(ids) for ids in model.bad_words_ids if len(ids) > 1 or ids[0] not in model.eos_token_ids]:
        steps.append(NoBadWordsLogitsProcessor(bad))
    return steps


def _bounds(params: SamplingParams, model: ModelProcessors, prompt_length: int, stop_ids: frozenset[int]) -> list[_Step]:
    """Steps that depend on the length of the answer, and suppressed tokens."""
    steps: list[_Step] = []
    if params.min_tokens:
        steps.append(_MinTokens(params.min_tokens, prompt_length, stop_ids))
    if model.forced_bos_token_id is not None:
        steps.append(ForcedBOSTokenLogitsProcessor(model.forced_bos_token_id))
    if model.forced_eos_token_id:
        steps.append(ForcedEOSTokenLogitsProcessor(prompt_length + params.max_tokens, list(model.forced_eos_token_id)))
    if model.remove_invalid_values:
        steps.append(InfNanRemoveLogitsProcessor())
    # With ``ignore_eos``, the answer does not end at end-of-text tokens, so they are not made likelier.
    if model.exponential_decay_length_penalty is not None and not params.ignore_eos:
        steps.append(_Decay(model.exponential_decay_length_penalty, model.eos_token_ids, prompt_length))
    if model.suppress_tokens:
        steps.append(SuppressTokensLogitsProcessor(model.suppress_tokens))
    if model.begin_suppress_tokens:
        begin = prompt_length + (1 if prompt_length == 1 and model.forced_bos_token_id is not None else 0)
        steps.append(SuppressTokensAtBeginLogitsProcessor(model.begin_suppress_tokens, begin))
    return steps


def _warpers(params: SamplingParams, model: ModelProcessors) -> list[_Step]:
    steps: list[_Step] = []
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if model.top_h is not None:
        steps.append(TopHLogitsWarper(model.top_h))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    if model.typical_p < 1:
        steps.append(TypicalLogitsWarper(model.typical_p))
    if 0 < model.epsilon_cutoff < 1:
        steps.append(EpsilonLogitsWarper(model.epsilon_cutoff))
    if 0 < model.eta_cutoff < 1:
        steps.append(EtaLogitsWarper(model.eta_cutoff))
    return steps


class LogitsPipeline:
    """Penalties and biases (``steps``), then temperature and truncation (``last``) of one request, as one function."""

    def __init__(self, steps: list[_Step], last: list[_Step]) -> None:
        self._steps = LogitsProcessorList(steps)
        self._last = LogitsProcessorList(last)

    def __call__(self, logits: torch.Tensor, history: Sequence[int], allowed: PackedBits | None = None) -> torch.Tensor:
        """[vocabulary], processed. Between the two, tokens are barred that are not ``allowed``; None: all are."""
        input_ids = torch.tensor([history], dtype=torch.long)
        processed: torch.Tensor = self._steps(input_ids, logits[None].float())
        if allowed is not None:
            processed = bar(processed[0], allowed)[None]
        processed = self._last(input_ids, processed)
        return processed[0]


class _OfPrompt:
    """A step that is made from the prompt, once: a request's prompt does not change."""

    def __init__(self, make: Callable[[torch.Tensor], _Step], prompt_length: int) -> None:
        self._make = make
        self._prompt_length = prompt_length
        self._step: _Step | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._step is None:
            self._step = self._make(input_ids[:, : self._prompt_length])
        return self._step(input_ids, scores)


class _Decay:
    """transformers' exponential decay, bounded: it grows with the answer and would overflow, long after it dominates."""

    def __init__(self, decay: tuple[int, float], eos_token_ids: Sequence[int], prompt_length: int) -> None:
        start, factor = decay
        self._step = ExponentialDecayLengthPenalty(decay, list(eos_token_ids), prompt_length)
        self._longest = prompt_length + start + int(_MOST_DECAY / math.log(factor)) if factor > 1 else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # The step only uses the number of tokens, so cutting them bounds it.
        processed: torch.Tensor = self._step(input_ids[:, : self._longest], scores)
        return processed


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
