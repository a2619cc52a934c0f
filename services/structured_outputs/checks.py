"""Whether a constraint can be honoured, together with the request's other parameters."""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLMatcher

from services.structured_outputs.grammars import engine_text, field_of, limits, refusal
from speculation.errors import InvalidArgument, spelled
from speculation.types import SamplingParams, StructuredOutputs

# Only a tokenizer can tell whether such tokens exist, and the verifier has it.
_FOR_THE_VERIFIER = "no tokenizer - can't validate"

# Constraints that are known to be valid, of 64 KiB at most each.
_KNOWN = 64


def check_sampling(params: SamplingParams) -> None:
    """Check that a request's constraint can be honoured, together with its other parameters. Takes up to a second.

    Raises:
        InvalidArgument: names the field.
    """
    structured = params.structured_outputs
    if structured is None:
        return
    check_companions(params, structured)
    _check_form(structured)


@lru_cache(_KNOWN)
def _check_form(structured: StructuredOutputs) -> None:
    """Each of a request's choices has the same, and the next turn of its conversation.

    Raises:
        InvalidArgument: it cannot be honoured.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(engine_text(structured), limits=limits())
    check_messages(structured, messages)
    if failed:
        raise refusal(structured, "it is not valid")


def check_companions(params: SamplingParams, structured: StructuredOutputs) -> None:
    """Refuse parameters that would have an answer go on where its grammar ends.

    Raises:
        InvalidArgument: names the field.
    """
    for name, neutral in (("min_tokens", 0), ("ignore_eos", False)):
        if (value := getattr(params, name)) != neutral:
            why = "an answer ends where its grammar does"
            raise InvalidArgument(name, value, f"{spelled(neutral)} with {field_of(structured)}: {why}")


def check_messages(structured: StructuredOutputs, messages: list[str]) -> None:
    """Refuse a constraint for the engine's errors and warnings: a warning says that part of it would be ignored.

    Raises:
        InvalidArgument: there are some that matter.
    """
    if found := [message for message in messages if not message.startswith(_FOR_THE_VERIFIER)]:
        raise refusal(structured, found[0])
