"""Fields of Anthropic's API that are not honoured: their harmless values, and the refusals of all others."""

from __future__ import annotations

from typing import Any

from services.api.http.harmless import Rule, among, never


def _any(value: Any) -> bool:
    return True


def _keeps_all(value: Any) -> bool:
    """Whether a management of the context leaves the conversation as it is."""
    edits = value.get("edits", []) if isinstance(value, dict) and set(value) <= {"edits"} else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("type") == "clear_thinking_20251015" and edit.get("keep") == "all"
        for edit in edits
    )


_CACHE: dict[str, Rule] = {"cache_control": (_any, "without effect: prompts are cached by themselves")}

BODY: dict[str, Rule] = {
    **_CACHE,
    "metadata": (lambda value: isinstance(value, dict), "an object"),
    "service_tier": (among("auto", "standard_only"), "auto or standard_only: there is one tier"),
    "speed": (among("standard"), "standard: there is one speed"),
    "context_management": (_keeps_all, "unset, or keep all thinking: the conversation is sent to the model as it is"),
    "mcp_servers": (among([]), "unset: the client calls tools, not the server"),
    "container": (never, "unset: nothing is run in containers"),
    "thread": (never, "unset: a conversation is sent whole"),
    "compaction": (never, "unset: the conversation is sent to the model as it is"),
    "fallbacks": (among([]), "unset: there is one model"),
    "diagnostics": (_any, "without effect: usage.cache_read_input_tokens says how much of a prompt was cached"),
    "fallback_credit_token": (_any, "without effect: nothing is billed"),
    "billing_policy": (never, "unset: nothing is billed"),
    "inference_geo": (never, "unset: requests are answered where the server runs"),
}
BLOCK: dict[str, Rule] = {
    **_CACHE,
    "citations": (among([]), "unset: documents are not read, so that nothing is cited"),
    "caller": (among({"type": "direct"}), "unset, or direct: the client calls tools"),
}
TOOL: dict[str, Rule] = {
    **_CACHE,
    "eager_input_streaming": (among(True, False), "true or false: inputs are streamed as they come"),
    "defer_loading": (among(False), "false: the model is shown all tools"),
    "allowed_callers": (among(["direct"]), "[direct]: the client calls tools"),
    "input_examples": (among([]), "unset: put examples into the description"),
}
# What Anthropic's own client understands: it then sends the conversation whole.
CODES = {"thread": "thread_unsupported_request"}
# Fields of other APIs: what to say instead.
HINTS: dict[str, str] = {
    "max_completion_tokens": "unset: say max_tokens",
    "stop": "unset: say stop_sequences",
    "n": "unset: a request has one answer",
    "logprobs": "unset: say it to /v1/chat/completions",
    "top_logprobs": "unset: say it to /v1/chat/completions",
    "prompt_logprobs": "unset: say it to /v1/chat/completions",
    "response_format": "unset: say output_config.format",
    "output_format": "unset: say output_config.format",
    "reasoning_effort": "unset: say output_config.effort",
    "parallel_tool_calls": "unset: say tool_choice.disable_parallel_tool_use",
    "max_tokens_to_sample": "unset: say max_tokens",
    "prompt": "unset: say messages",
}
