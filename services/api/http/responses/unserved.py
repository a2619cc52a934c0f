"""Fields of the Responses API that are not served: their harmless values, and what is said of all others."""

from __future__ import annotations

from typing import Any

from services.api.http.openai.field_rules import HINTS as OF_OTHER_SERVERS
from services.api.http.openai.field_rules import SHARED, Rule, is_one_of, never, take_unhonoured
from services.api.http.openai.fields import Fields

UNSERVED: dict[str, Rule] = {
    "background": (is_one_of(False), "false: a response is made while its request waits for it"),
    "background_options": (never, "unset: nothing runs in the background"),
    "conversation": (never, "unset: say previous_response_id"),
    "prompt": (never, "unset: there are no stored prompt templates"),
    "context_management": (is_one_of([]), "unset: a conversation is read as it is"),
    "max_tool_calls": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        "a whole number from 1: it counts calls of built-in tools, of which there are none",
    ),
    "image": (never, "unset: the model reads text alone"),
    "access_programs": (never, "unset: there are none"),
    "prompt_cache_options": SHARED["prompt_cache_options"],
    "moderation": SHARED["moderation"],
    "n": (is_one_of(1), "unset or 1: there is one answer; /v1/chat/completions gives several"),
    "modalities": (is_one_of(["text"]), "[text]: answers are text"),
}

HINTS: dict[str, str] = {
    **OF_OTHER_SERVERS,
    "messages": "unset: say input, or use /v1/chat/completions",
    "max_tokens": "unset: say max_output_tokens",
    "max_completion_tokens": "unset: say max_output_tokens",
    "n_predict": "unset: say max_output_tokens",
    "max_new_tokens": "unset: say max_output_tokens",
    "response_format": "unset: say text.format",
    "json_schema": "unset: say text.format or structured_outputs.json",
    "reasoning_effort": "unset: say reasoning.effort",
    "verbosity": "unset: say text.verbosity",
    "logprobs": "unset: say top_logprobs, or include: [message.output_text.logprobs]",
    "functions": "unset: functions are given as tools",
    "function_call": "unset: say tool_choice",
}


def check_unserved(body: dict[str, Any]) -> dict[str, Any]:
    """The body without fields that ask for nothing.

    Raises:
        Refused: one of them asks for something; says what is allowed.
    """
    take_unhonoured(Fields(body), UNSERVED)
    return {name: value for name, value in body.items() if value is not None and name not in UNSERVED}
