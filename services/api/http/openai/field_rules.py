"""Fields of OpenAI's, vLLM's and llama-server's APIs that are not honoured here: their harmless values, and the refusals of
all others. The honoured ones are read by ``chat_request`` and ``completion_request``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.api.http.openai.fields import Fields

_HARMLESS_METADATA = 16


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    """Of fields some of whose values ask for nothing."""
    # Compared with their types: 1 is not True.
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _metadata(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _HARMLESS_METADATA
        and all(isinstance(text, str) and len(text) <= 512 for text in value.values())
        and all(len(key) <= 64 for key in value)
    )


def never(value: Any) -> bool:
    """Of fields all of whose values ask for something."""
    return False


Rule = tuple[Callable[[Any], bool], str]

_CACHES = "unset: prompts are cached for each API key by themselves, as long as there is room"
_BEAMS = "unset: answers are decoded without beams"
_TOOLS = "unset: functions are given as tools"
_STRUCTURED = "unset: say structured_outputs"

# Of both endpoints.
SHARED: dict[str, Rule] = {
    # What cannot change an answer.
    "user": (_text, "a text"),
    "safety_identifier": (_text, "a text"),
    "metadata": (_metadata, f"an object of at most {_HARMLESS_METADATA} texts of at most 512 characters"),
    "prompt_cache_key": (_text, "a text"),
    "service_tier": (is_one_of("auto", "default"), "auto or default: there is one tier"),
    "store": (is_one_of(False), "false: answers are not stored"),
    "cache_prompt": (is_one_of(True), _CACHES),
    "prompt_cache_retention": (is_one_of("in_memory", "in-memory"), f"in_memory, or {_CACHES}"),
    "spaces_between_special_tokens": (is_one_of(True), "true: the tokenizer alone decides on spaces"),
    "guided_decoding_backend": (_text, "a text"),
    # What is not served; a value that asks for nothing is accepted.
    "prompt_cache_options": (never, _CACHES),
    "moderation": (never, "unset: answers are not moderated"),
    "use_beam_search": (is_one_of(False), _BEAMS),
    "length_penalty": (is_one_of(1, 1.0), _BEAMS),
    "kv_transfer_params": (never, "unset: caches are not moved between servers"),
    "mm_processor_kwargs": (never, "unset: the model reads text alone"),
    "logits_processors": (is_one_of([]), "unset: programs are not taken from requests"),
    "repetition_detection": (never, "unset: say repetition_penalty"),
    "vllm_xargs": (never, "unset: there are no such arguments"),
    "thinking_token_budget": (never, "unset: thoughts have no limit of their own"),
}

CHAT: dict[str, Rule] = {
    **SHARED,
    "functions": (never, _TOOLS),
    "function_call": (is_one_of("none"), _TOOLS),
    "audio": (never, "unset: answers are text"),
    "modalities": (is_one_of(["text"]), "[text]: answers are text"),
    "web_search_options": (never, "unset: nothing is looked up on the web"),
    "verbosity": (is_one_of("medium"), "medium: the model is asked as it is"),
    "chat_template": (never, "unset: templates are programs, which are not taken from requests"),
    "documents": (is_one_of([]), "unset: put documents into a message"),
    "echo": (is_one_of(False), "false: the conversation is not repeated"),
    "add_special_tokens": (is_one_of(False), "false: the chat template writes special tokens itself"),
    "suffix": (never, "unset: a conversation is continued at its end"),
    "best_of": (is_one_of(1), "unset or 1: say n"),
    "prompt": (never, "unset: say messages, or use /v1/completions"),
}

COMPLETION: dict[str, Rule] = {
    **SHARED,
    "include_reasoning": (is_one_of(True), "true: nothing is cut out of texts"),
    "add_special_tokens": (is_one_of(True), "true: prompts get the special tokens that the tokenizer adds"),
    "prompt_embeds": (never, "unset: prompts are text or token ids"),
    "messages": (never, "unset: say prompt, or use /v1/chat/completions"),
    "max_completion_tokens": (never, "unset: say max_tokens"),
    "top_logprobs": (never, "unset: logprobs says how many"),
}

# Fields of llama-server, and old ones of vLLM's: what to say instead.
HINTS: dict[str, str] = {
    "grammar": "unset: say structured_outputs.grammar",
    "json_schema": "unset: say response_format or structured_outputs.json",
    "n_probs": "unset: say logprobs",
    "n_predict": "unset: say max_tokens",
    "timings_per_token": "unset: say stream_options.continuous_usage_stats",
    "response_fields": "unset: answers are given whole",
    "typical_p": "unset: the model's generation_config may set it",
    "mirostat": "unset: say temperature, top_p or min_p",
    "repeat_penalty": "unset: say repetition_penalty",
    "speculative": "unset: say speculation",
    "strategy": "unset: say speculation.strategy",
    "stop_sequences": "unset: say stop",
    "max_new_tokens": "unset: say max_tokens",
    **{f"speculative.{name}": "unset: say speculation" for name in ("n_max", "n_min", "p_min")},
    "guided_whitespace_pattern": _STRUCTURED,
}


def take_unhonoured(fields: Fields, rules: dict[str, Rule]) -> None:
    """Take the fields that ask for nothing.

    Raises:
        Refused: one asks for something; says what is allowed.
    """
    for key, (harmless, allowed) in rules.items():
        value = fields.take(key)
        if value is not None and not harmless(value):
            shown = value if isinstance(value, str | int | float) and value != "" else "set"
            raise fields.refuse(key, shown, allowed, "unsupported_parameter")
