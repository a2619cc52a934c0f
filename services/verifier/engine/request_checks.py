"""Refuses, before a request waits, what the target cannot compute."""

from __future__ import annotations

from services.verifier.model.target_port import Target
from speculation.errors import InvalidArgument
from speculation.messages import GenerationRequest
from speculation.room import room_behind


def check_request(message: GenerationRequest, target: Target) -> None:
    """Check a request against the target's limits.

    Raises:
        InvalidArgument: no prompt, a token id outside the vocabulary, or a layer that does not exist; names the field.
        PromptTooLong: the prompt leaves no room for an answer.
    """
    prompt, vocab = message.prompt, target.vocab_size
    if not prompt:
        raise InvalidArgument("prompt", "empty", "at least one token")
    room_behind(len(prompt), target.max_model_len)
    for name, ids in (
        ("prompt_token_ids", prompt),
        ("committed_token_ids", message.committed),
        ("stop_token_ids", message.sampling.stop_token_ids),
        ("logit_bias", message.sampling.logit_bias),
        ("allowed_token_ids", message.sampling.allowed_token_ids),
        ("bad_words", [token for word in message.sampling.bad_words for token in word]),
    ):
        # There may be a million of them.
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(token for token in ids if not 0 <= token < vocab)
            raise InvalidArgument(name, wrong, f"token ids below {vocab}")
    target.check_layers(message.plan.observe_layers)
