"""Counts of a request's tokens, and how they were decoded."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any

from services.api.messages import Completion, decoding_figures
from services.api.model_card import ModelCard
from speculation.types import Report, SpeculationStats

# The name of the source that drafts from a request's ``prediction``.
_PREDICTION = "prediction"


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    ended: Sequence[Completion] = (),
    *,
    predicted: bool = False,
    thought_tokens: int | None = None,
) -> Any:
    """``usage`` of an answer, with details where all of its choices have ended.

    Args:
        prompt_tokens: each prompt once, however many choices it has.
        ended: the ends of all choices; empty while some go on.
        predicted: the request has a prediction.
        thought_tokens: of all choices' thoughts; None: the model does not mark them.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if ended:
        # What a choice finds in the cache may be what another choice has just computed.
        cached = min(prompt_tokens, sum(_fewest_cached(ended).values()))
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
        details: dict[str, int] = {} if thought_tokens is None else {"reasoning_tokens": thought_tokens}
        if predicted:
            accepted = sum(end.stats.accepted_by_source.get(_PREDICTION, 0) for end in ended)
            rejected = sum(max(0, end.predicted_tokens - end.stats.accepted_by_source.get(_PREDICTION, 0)) for end in ended)
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if details:
            counts["completion_tokens_details"] = details
    return counts


def _fewest_cached(ended: Sequence[Completion]) -> dict[tuple[int, ...], int]:
    fewest: dict[tuple[int, ...], int] = {}
    for end in ended:
        fewest[end.prompt_token_ids] = min(end.cached_tokens, fewest.get(end.prompt_token_ids, end.cached_tokens))
    return fewest


def metrics(ended: Sequence[Completion], report: Report) -> dict[str, Any]:
    """``metrics`` of an answer, by vLLM's names, over all of its choices: one choice's ``switches`` after another's.

    Args:
        report: what the answer tells of its drafts. Without a report it has no counts for each length of a draft: of trees
            there can be hundreds.
    """
    stats = SpeculationStats()
    for end in ended:
        _add(stats, end.stats)
    figures = decoding_figures(ended[0].strategy, stats, ended[0].rule, ended[0].learnt)
    if report != "none":
        figures["acceptance_histogram_by_draft_length"] = stats.acceptance_histogram_by_draft_length
    if compared := [dataclasses.asdict(each) for end in ended for each in end.comparisons]:
        figures["comparisons"] = compared
    return {
        "speculative_decoding": figures,
        "queue_s": max(end.timing.queue_s for end in ended),
        "time_to_first_token_s": min(end.timing.time_to_first_token_s for end in ended),
        "total_s": max(end.timing.total_s for end in ended),
    }


def _add(total: SpeculationStats, one: SpeculationStats) -> None:
    total.num_spec_steps += one.num_spec_steps
    total.num_draft_tokens += one.num_draft_tokens
    total.num_accepted_draft_tokens += one.num_accepted_draft_tokens
    total.num_committed_tokens += one.num_committed_tokens
    total.num_spec_tokens = max(total.num_spec_tokens, one.num_spec_tokens)
    for step, count in one.accepted_of_drafted.items():
        total.accepted_of_drafted[step] = total.accepted_of_drafted.get(step, 0) + count
    for source, count in one.accepted_by_source.items():
        total.accepted_by_source[source] = total.accepted_by_source.get(source, 0) + count
    total.switches += one.switches
    total.seconds_saved += one.seconds_saved


@cache
def server_version() -> str:
    """The version of Outrider."""
    return metadata.version("outrider-server")


def fingerprint(card: ModelCard) -> str:
    """A short hash of the server's version and of everything that decides the model's tokens."""
    limits = (card.max_model_len, card.vocab_size)
    told = (server_version(), card.name, *limits, card.bit_exact, card.defaults, card.processors, card.arithmetic)
    return "fp_" + hashlib.sha256(repr(told).encode()).hexdigest()[:12]
