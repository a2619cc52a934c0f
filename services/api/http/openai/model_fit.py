"""A request and the one model that is served: its names, the options that its chat template reads, its calls of tools."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from services.api.http.openai.answer_form import schema_form
from services.api.http.openai.chat_options import EFFORT, LIMIT, VERBOSITY, given_in, with_switch, written
from services.api.http.openai.errors import Refused, shown
from services.api.http.openai.prompt_thought import behind_thought, limited_thought, limits_thoughts
from services.api.http.openai.request import Asked, Input
from services.api.http.openai.tool_choice import ToolUse
from services.api.messages import TAKEN, ChatMessage, RequestedSampling
from services.api.model_card import ModelCard
from services.structured_outputs.checks import check_sampling
from services.tool_formats.harmony import NAME as HARMONY
from speculation.errors import InvalidArgument, NotFound
from speculation.types import SamplingParams

# Makes a check that takes long where it holds up nobody else.
Aside = Callable[[Callable[[], Any]], Awaitable[Any]]
# As long, a tool is looked for whose schema made a request's form invalid. One may take half a second.
_NAMED_WITHIN_S = 1.0


def called(card: ModelCard, name: str | None) -> ModelCard:
    """The model by the name that a request calls it, or that of one of its adapters; None: by its first one.

    Raises:
        NotFound: it has no such name.
    """
    if name is None:
        return card
    if name in card.adapters:
        return replace(card, name=name, arithmetic=card.adapters[name])
    names = (card.name, *card.aliases, *card.adapters)
    if name not in names:
        raise NotFound("model", name or "empty", ", ".join(names))
    return replace(card, name=name)


def readable(asked: Asked, card: ModelCard, *, strict: bool) -> tuple[Asked, tuple[str, ...]]:
    """The request without options, thoughts and names that the chat template does not read, and their fields' names.

    Args:
        strict: they are refused instead.

    Raises:
        Refused: there are some, and they are.
    """
    asked, unread = _known_options(asked, card, strict=strict)
    for field, what in (("reasoning_content", "thoughts"), ("name", "names")):
        found = [
            (f"messages[{index}].{field}", _unread_of(message, field, card))
            for source in asked.inputs
            for index, message in enumerate(source)
            if isinstance(message, ChatMessage) and _unread_of(message, field, card)
        ]
        if found and strict:
            raise Refused(*found[0], f"unset: this model's chat template has no place for {what}", "unsupported_parameter")
        unread += (f"messages[].{field}",) if found else ()
    return replace(asked, inputs=tuple(_read_of(source, card) for source in asked.inputs)), unread


def _unread_of(message: ChatMessage, field: str, card: ModelCard) -> str:
    """What a message says in a field that the chat template does not read."""
    if field == "reasoning_content":
        return "" if card.reads_thoughts else message.reasoning
    # A tool's name says which call it answers; templates may go by the order instead.
    return "" if message.role in (*card.named_roles, "tool") else message.name


def _read_of(source: Input, card: ModelCard) -> Input:
    messages = [
        replace(
            each,
            reasoning=each.reasoning if card.reads_thoughts else "",
            name="" if _unread_of(each, "name", card) else each.name,
        )
        for each in source
        if isinstance(each, ChatMessage)
    ]
    return tuple(messages) or source


def _known_options(asked: Asked, card: ModelCard, *, strict: bool) -> tuple[Asked, tuple[str, ...]]:
    asked = replace(asked, chat=with_switch(asked.chat, card))
    given = given_in(asked.chat)
    unread = {name: value for name, value in given.items() if name not in card.template_options and name not in TAKEN}
    if not unread:
        return asked, ()
    named = tuple(name if name in (EFFORT, VERBOSITY) else f"chat_template_kwargs.{name}" for name in unread)
    if strict:
        free = ", ".join(card.template_options) or "none"
        value = next(iter(unread.values()))
        raise Refused(named[0], shown(value), f"unset: of such options, this model's chat template reads: {free}")
    kept = {name: value for name, value in given.items() if name not in unread}
    return replace(asked, chat=replace(asked.chat, template_kwargs=written(kept))), named


async def unused_form(asked: Asked, aside: Aside, *, strict: bool) -> tuple[str, ...]:
    """The name of the field that asks for a form of text where the answer is calls; none: no field does.

    Args:
        strict: it is refused instead.

    Raises:
        Refused: it is, or the form is not valid.
    """
    form = asked.text_form
    if form is None:
        return ()
    if strict:
        allowed = "unset where tool_choice makes the answer calls, which have no text"
        raise Refused("response_format", "set", allowed, "unsupported_parameter")
    try:
        await aside(partial(check_sampling, SamplingParams(max_tokens=1, structured_outputs=form)))
    except InvalidArgument as error:
        raise Refused(asked.text_form_field, error.value, error.allowed) from error
    return ("response_format",)


def check_tools(asked: Asked, card: ModelCard) -> None:
    """Check that the model can write calls of tools in its text, where it is to be free to.

    Raises:
        Refused: it cannot.
    """
    if asked.tools is not None and asked.tools.mode == "auto" and not card.tool_format:
        raise Refused(
            "tool_choice",
            "auto",
            "none, required or a function's name: this model's chat template does not say how calls of tools are written",
            "unsupported_value",
        )


def limited(asked: Asked, card: ModelCard, *, strict: bool) -> tuple[Asked, tuple[str, ...]]:
    """The request without a limit of thoughts that cannot be kept, by this model or beside a form; and its field.

    Raises:
        Refused: there is one, and nothing may be left out (``strict``).
    """
    if asked.thought_limit is None:
        return asked, ()
    formed = asked.sampling.structured_outputs is not None or (asked.tools is not None and asked.tools.form_within(card))
    if limits_thoughts(card) and not formed:
        return asked, ()
    if strict:
        allowed = "unset: this model's thoughts have no marks that are tokens, or the answer has a form"
        raise Refused(LIMIT, asked.thought_limit, allowed, "unsupported_parameter")
    return replace(asked, thought_limit=None), (LIMIT,)


def check_infill(asked: Asked, card: ModelCard) -> None:
    """Check that the model fills gaps, where one is to be filled.

    Raises:
        Refused: it does not.
    """
    if asked.infill is not None and not card.infills:
        allowed = "unset: this model's tokenizer has no fill-in-the-middle tokens"
        raise Refused("suffix", asked.infill.suffix or "empty", allowed, "unsupported_parameter")


def formed(asked: Asked, card: ModelCard, *, thinking: bool) -> RequestedSampling:
    """The request's sampling with the form that all of the answer must have.

    Args:
        thinking: the prompt has begun a thought.

    Raises:
        InvalidArgument: the form is not valid, or cannot be had beside another.
    """
    sampling = asked.sampling
    if asked.tools is not None and asked.tools.mode == "auto":
        sampling = _held_to_calls(asked.tools, sampling, card)
        if card.tool_format == HARMONY and asked.sampling.structured_outputs is None:
            # Of the messages, those that are thoughts are part of the form.
            return sampling
    # An answer that is no longer has no longer thought.
    if asked.thought_limit is not None and asked.thought_limit < (sampling.max_tokens or asked.thought_limit + 1):
        return limited_thought(sampling, card, asked.thought_limit, thinking=thinking)
    chats = not isinstance(asked.inputs[0], str) and isinstance(asked.inputs[0][0], ChatMessage)
    return behind_thought(sampling, card, thinking=thinking) if chats else sampling


def _held_to_calls(tools: ToolUse, sampling: RequestedSampling, card: ModelCard) -> RequestedSampling:
    """The request's sampling with the form that its tools ask of the model's text.

    Raises:
        Refused: they ask for one that cannot be had beside another.
    """
    form = sampling.structured_outputs
    if form is None:
        return replace(sampling, structured_outputs=tools.form_within(card))
    if tools.strict:
        allowed = "unset where tool_choice is auto and the answer's form is given, too"
        raise Refused(next(iter(tools.strict.values())), True, allowed, "unsupported_value")
    # An answer that follows a JSON schema calls nothing.
    if (tools.allowed or not tools.several) and form.kind not in ("json", "json_object"):
        allowed = "unset where tool_choice is auto and the answer's form is given, too"
        if tools.allowed:
            raise Refused("tool_choice", "allowed_tools", allowed, "unsupported_value")
        raise Refused("parallel_tool_calls", False, allowed, "unsupported_value")
    return sampling


async def of_a_tool(asked: Asked, error: InvalidArgument, aside: Aside) -> InvalidArgument:
    """The same error; where one tool's schema is the reason, it is named, if it is soon found. Takes time for each tool."""
    if asked.tools is None or asked.form_field not in ("", "tools") or not error.field.startswith("structured_outputs."):
        return error
    found: InvalidArgument = await aside(partial(_of_a_tool, asked.tools, error))
    return found


def _of_a_tool(tools: ToolUse, error: InvalidArgument) -> InvalidArgument:
    ends = time.monotonic() + _NAMED_WITHIN_S
    for index, (name, schema) in enumerate(tools.schemas.items()):
        if time.monotonic() > ends:
            break
        if tools.called not in ("", name) or name not in tools.callable:
            continue
        try:
            check_sampling(SamplingParams(max_tokens=1, structured_outputs=schema_form(schema, "tools")))
        except InvalidArgument as found:
            return Refused(f"tools[{index}].function.parameters", found.value, found.allowed, "invalid_value")
    return error
