"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.api.http.openai.chat_messages import read_messages
from services.api.http.openai.chat_options import read_chat_options
from services.api.http.openai.completion_request import read_prompts
from services.api.http.openai.errors import Refused
from services.api.http.openai.fields import Fields
from services.api.http.openai.protocol.token_bodies import DetokenizeBody, TokenizeBody
from services.api.http.openai.tool_choice import read_tools
from services.api.messages import ClientRequest, RequestedSampling


def read_tokenize(body: dict[str, Any]) -> tuple[str | None, ClientRequest, bool]:
    """The model, what to tokenise, and whether the tokens are to be spelt out, too.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    fields = Fields(body, TokenizeBody)
    model, names = fields.text("model"), fields.truth("return_token_strs") or False
    if fields.given("messages") and fields.given("prompt"):
        raise fields.refuse("prompt", "set", "unset where messages is set")
    if fields.given("messages"):
        messages, tools = read_messages(fields), read_tools(fields)
        request = ClientRequest(input=messages, sampling=RequestedSampling(), chat=read_chat_options(fields, tools))
    else:
        prompts = read_prompts(fields)
        if len(prompts) != 1:
            raise Refused("prompt", f"{len(prompts)} prompts", "one prompt")
        request = ClientRequest(input=prompts[0], sampling=RequestedSampling())
    special = fields.truth("add_special_tokens")
    if special is not None and isinstance(request.input, str):
        request = replace(request, add_special_tokens=special)
    elif special:
        raise fields.refuse("add_special_tokens", True, "false, or unset, for messages and token ids")
    fields.end()
    return model, request, names


def read_detokenize(body: dict[str, Any]) -> tuple[str | None, tuple[int, ...]]:
    """The model, and the tokens.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    fields = Fields(body, DetokenizeBody)
    model, ids = fields.text("model"), fields.ids("tokens")
    if ids is None:
        raise fields.refuse("tokens", "unset", "a list of token ids", "missing_required_parameter")
    fields.end()
    return model, ids
