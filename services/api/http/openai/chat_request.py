"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from services.api.http.openai import field_rules, other_servers
from services.api.http.openai.answer_form import read_form
from services.api.http.openai.chat_messages import read_messages
from services.api.http.openai.chat_options import LIMIT, read_chat_options
from services.api.http.openai.fields import Fields
from services.api.http.openai.protocol.chat_body import ChatBody
from services.api.http.openai.request import Asked
from services.api.http.openai.shared_fields import (
    read_others,
    read_prompt_logprobs,
    read_sampling,
    read_seed,
    read_stream,
)
from services.api.http.openai.tool_choice import ToolUse, read_tools
from services.api.messages import RequestedSampling
from speculation.types import StructuredOutputs


def read_chat(body: dict[str, Any]) -> Asked:
    """What a body asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    fields = Fields(other_servers.in_own_names(body), ChatBody)
    messages = read_messages(fields)
    tools = read_tools(fields)
    options = read_chat_options(fields, tools)
    if options.continue_final_message and messages[-1].role != "assistant":
        raise fields.refuse("continue_final_message", True, "false where the last message is not the assistant's")
    sampling = read_sampling(fields)
    length, length_field = _length(fields)
    top = _logprobs(fields)
    seed, stream, others = read_seed(fields), read_stream(fields), read_others(fields)
    scored = read_prompt_logprobs(fields, stream)
    form, told = _form(fields, tools)
    tier, thoughts = fields.given("service_tier"), fields.truth("include_reasoning") is not False
    thought_limit = fields.whole(LIMIT)
    without_effect = field_rules.take_unhonoured(fields, ChatBody)
    left_out = other_servers.end(fields, field_rules.HINTS, body)
    return Asked(
        inputs=(messages,),
        sampling=RequestedSampling(
            **sampling, max_tokens=length, logprobs=top, structured_outputs=form, prompt_logprobs=scored
        ),
        prompt_logprobs=scored,
        length_field=length_field,
        top_logprobs=top,
        seed=seed,
        stream=stream,
        tools=tools,
        chat=options,
        tier=tier,
        thoughts=thoughts,
        thought_limit=thought_limit,
        metadata=without_effect.get("metadata", {}),
        left_out=left_out,
        **told,
        **others,
    )


def _length(fields: Fields) -> tuple[int | None, str]:
    """The most tokens of the answer, and the field that says so."""
    old, new = _tokens(fields, "max_tokens"), _tokens(fields, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise fields.refuse("max_tokens", old, f"unset, or as max_completion_tokens, {new}")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _tokens(fields: Fields, key: str) -> int | None:
    length = fields.whole(key)
    if length == 0:
        raise fields.refuse(key, 0, "-1, or a whole number from 1")
    return None if length == -1 else length


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.truth("logprobs"), fields.whole("top_logprobs")
    if top is not None and not wanted:
        # 0 is what a request without it gets.
        if top:
            raise fields.refuse("top_logprobs", top, "unset where logprobs is not true")
        return None
    return (top or 0) if wanted else None


def _form(fields: Fields, tools: ToolUse | None) -> tuple[StructuredOutputs | None, dict[str, Any]]:
    """The answer's form; and by their names in ``Asked``, the field that holds it, and a form of text that has no effect."""
    form, field = read_form(fields)
    called = None if tools is None else tools.form
    # response_format is that of text, of which an answer that is calls has none.
    if form is not None and called is not None and not field.startswith("response_format"):
        raise fields.refuse("tool_choice", "set", "auto or none where the answer's form is given")
    if called is None:
        return form, {"form_field": field}
    return called, {"form_field": "tools", "text_form": form, "text_form_field": field}
