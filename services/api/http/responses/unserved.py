"""Fields of the Responses API that are not served: their harmless values, and what is said of all others."""

from __future__ import annotations

from typing import Any

from services.api.http.harmless import Rule, among, honoured, never
from services.api.http.openai.field_rules import HINTS as OF_OTHER_SERVERS
from services.api.http.openai.other_servers import asks_for_nothing

UNSERVED: dict[str, Rule] = {
    "background": (among(False), "false: a response is made while its request waits for it"),
    "background_options": (never, "unset: nothing runs in the background"),
    "conversation": (never, "unset: say previous_response_id"),
    "prompt": (never, "unset: there are no stored prompt templates"),
    "context_management": (among([]), "unset: a conversation is read as it is"),
    "image": (never, "unset: the model reads text alone"),
    "access_programs": (never, "unset: there are none"),
    "moderation": (never, "unset: answers are not moderated"),
    "modalities": (among(["text"]), "[text]: answers are text"),
    "n": (among(1), "unset or 1: there is one answer; /v1/chat/completions gives several"),
}

# A field of OpenAI's here is one of OpenRouter's at the chat door.
_OF_OTHERS = {name: hint for name, hint in OF_OTHER_SERVERS.items() if name != "reasoning"}
HINTS: dict[str, str] = {
    **_OF_OTHERS,
    "messages": "unset: say input, or use /v1/chat/completions",
    "max_tokens": "unset: say max_output_tokens",
    "max_completion_tokens": "unset: say max_output_tokens",
    **{name: "unset: say max_output_tokens" for name, hint in _OF_OTHERS.items() if hint == "unset: say max_tokens"},
    **{name: "unset: say top_logprobs" for name, hint in _OF_OTHERS.items() if hint == "unset: say logprobs"},
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), "unset: thoughts are items of their own"),
    **dict.fromkeys(("timings_per_token", "return_progress"), "unset: an answer's end has usage and metrics"),
    "return_cached_tokens_details": "unset: usage.input_tokens_details has them",
    "response_format": "unset: say text.format",
    "json_schema": "unset: say text.format or structured_outputs.json",
    "reasoning_effort": "unset: say reasoning.effort",
    **dict.fromkeys(("think", "thinking", "enable_thinking"), "unset: say reasoning.effort or chat_template_kwargs"),
    "verbosity": "unset: say text.verbosity",
    "logprobs": "unset: say top_logprobs, or include: [message.output_text.logprobs]",
    "functions": "unset: functions are given as tools",
    "function_call": "unset: say tool_choice",
}


def check_unserved(body: dict[str, Any]) -> dict[str, Any]:
    """The body without fields that ask for nothing, other servers' included.

    Raises:
        Refused: one that is not served asks for something; says what is allowed.
    """
    return {
        name: value
        for name, value in honoured(body, UNSERVED).items()
        if value is not None and not (name in _OF_OTHERS and asks_for_nothing(name, value, body))
    }
