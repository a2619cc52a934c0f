"""The tokens that a request is charged before its prompt is tokenised, and the requests that a key allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.access.key_records import KeyRecord
from services.api.messages import ChatMessage, ClientRequest
from services.api.model_card import ModelCard
from speculation.errors import InvalidArgument
from speculation.room import longest_answer

# Characters of an average token, until the tokeniser has counted them.
_CHARACTERS_PER_TOKEN = 4


def within(record: KeyRecord, request: ClientRequest) -> ClientRequest:
    """The request as the router gets it.

    Raises:
        InvalidArgument: it asks for a longer answer, or for another strategy, than the key may.
    """
    asked = request.sampling.max_tokens
    if asked is not None and record.max_tokens is not None and asked > record.max_tokens:
        raise InvalidArgument("max_tokens", asked, f"at most {record.max_tokens} with this API key")
    if request.strategy is not None and record.strategies is not None and request.strategy not in record.strategies:
        allowed = ", ".join(sorted(record.strategies))
        raise InvalidArgument("speculation.strategy", request.strategy, f"one of {allowed} with this API key")
    how = replace(request.how, key=record.id)
    return replace(request, tenant=record.tenant, weight=record.weight, most_tokens=record.max_tokens, how=how)


def nameable(record: KeyRecord, card: ModelCard) -> ModelCard:
    """The model as a key's holder sees it: with the strategies alone that its requests may name."""
    if record.strategies is None:
        return card
    return replace(card, strategies=tuple(name for name in card.strategies if name in record.strategies))


def estimate(request: ClientRequest) -> int:
    """About how many tokens the prompt has; exactly, where it is given in tokens."""
    source = request.input
    if isinstance(source, str):
        return -(-len(source) // _CHARACTERS_PER_TOKEN)
    # All of one kind: millions of ids are not looked at one by one.
    if source and isinstance(source[0], int):
        return len(source)
    characters = sum(len(entry.role) + len(entry.content) for entry in source if isinstance(entry, ChatMessage))
    return -(-characters // _CHARACTERS_PER_TOKEN)


def charge_of(request: ClientRequest, prompt_tokens: int) -> int:
    """The tokens that are charged for a request at first."""
    return prompt_tokens + _longest(request)


def _longest(request: ClientRequest) -> int:
    return longest_answer(request.sampling.max_tokens, most=request.most_tokens)


def tokens_of(record: KeyRecord, requests: Sequence[ClientRequest]) -> int:
    """The tokens that are charged for requests together.

    Raises:
        InvalidArgument: the key's rate can never allow so many.
    """
    tokens = sum(charge_of(request, estimate(request)) for request in requests)
    if record.tokens_per_minute is not None and tokens > record.tokens_per_minute:
        also = f", and all {len(requests)} answers" if len(requests) > 1 else ""
        allowed = f"small enough for this key's {record.tokens_per_minute} tokens_per_minute, with the prompt's tokens{also}"
        raise InvalidArgument("max_tokens", _longest(requests[0]), allowed)
    return tokens
