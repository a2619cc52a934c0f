"""Makes one request for each choice of a body."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from services.api.http.openai.chat_options import LIMIT
from services.api.http.openai.errors import Refused, renamed
from services.api.http.openai.model_fit import (
    Aside,
    called,
    check_infill,
    check_tools,
    formed,
    limited,
    readable,
    unused_form,
)
from services.api.http.openai.oldest_turns import fitting
from services.api.http.openai.prompt_thought import begins_thought
from services.api.http.openai.request import Asked, Input
from services.api.messages import (
    ChatMessage,
    ChatOptions,
    ClientRequest,
    HowAsked,
    RequestedSampling,
    RouterPort,
    system_prompt_of,
)
from services.api.model_card import ModelCard
from services.structured_outputs.grammars import field_of
from speculation.errors import InvalidArgument
from speculation.room import check_fits, longest_answer, room_behind
from speculation.types import SamplingDefaults

# Of OpenAI's API, for requests that do not say.
_TEMPERATURE = 1.0
# A request's answers may together have so many times the tokens of the context.
_CONTEXTS = 16
# What the router calls the grammar of calls.
_GRAMMAR = "structured_outputs.grammar"
# Seeds are drawn so that every JSON reader keeps them exact.
_SEED_BITS = 52
# Of the name that the answers to one prompt have in common.
_SIBLINGS_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Requests for all choices, those to one prompt next to each other.

    Attributes:
        prompts: token ids of each input.
        echoed: the text to begin the answers to each input with; empty: none.
        ignored: fields without effect on this model.
        thinking: for each input, whether its prompt has begun a thought; none: none has.
    """

    card: ModelCard
    requests: tuple[ClientRequest, ...]
    prompts: tuple[tuple[int, ...], ...]
    echoed: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    thinking: tuple[bool, ...] = ()


def expected(asked: Asked, base: ClientRequest) -> list[ClientRequest]:
    """What is known of the request for each answer before the prompts are read. ``max_tokens`` is the least that it can be.

    Args:
        base: as of ``prepare``.
    """
    longest = None if asked.clips_length else asked.sampling.max_tokens
    sampling = replace(asked.sampling, max_tokens=longest or max(1, asked.sampling.min_tokens or 0))
    known = replace(base, sampling=sampling, model=asked.model, strategy=asked.strategy)
    return [replace(known, input=source) for source in asked.inputs for _ in range(asked.n)]


async def prepare(
    asked: Asked, card: ModelCard, router: RouterPort, base: ClientRequest, ignored: tuple[str, ...] = ()
) -> Prepared:
    """Complete a request with the defaults of OpenAI's API and of the model.

    Every prompt is tokenised once, for all of its choices.

    Args:
        asked, card, ignored: as of ``fitted``.
        base: tenant, request id, trace, and the longest answer that its caller may have.

    Raises:
        OutriderError: the request cannot be served.
    """
    if asked.compare and (answers := asked.n * len(asked.inputs)) > 1:
        raise Refused("speculation.compare", ", ".join(asked.compare), f"unset where a request has {answers} answers")
    whole = [
        await _tokenize(asked, router, replace(base, input=source, chat=asked.chat, infill=asked.infill), card)
        for source in asked.inputs
    ]
    prompts = [_cut(asked, ids, source, card) for ids, source in zip(whole, asked.inputs, strict=True)]
    seed = asked.seed if asked.seed is not None else secrets.randbits(_SEED_BITS)
    chats = any(isinstance(each, tuple) and isinstance(each[0], ChatMessage) for each in asked.inputs)
    how = _how_asked(base.how, asked, chats=chats)
    requests, thinking = [], []
    for ids in prompts:
        siblings = secrets.token_hex(_SIBLINGS_BYTES) if asked.n > 1 else ""
        thinking.append(thinks := chats and await begins_thought(ids, asked, router, card))
        sampling = _completed(asked, card, len(ids), base.most_tokens, thinking=thinks)
        requests += [
            replace(
                base,
                input=ids,
                chat=ChatOptions(continue_final_message=asked.chat.continue_final_message),
                of_conversation=chats,
                infill=asked.infill,
                sampling=replace(sampling, seed=(seed + choice) % 2**64),
                model=asked.model,
                strategy=asked.strategy,
                sources=asked.sources,
                num_speculative_tokens=asked.num_speculative_tokens,
                acceptance=asked.acceptance,
                effort=asked.effort,
                drafter=asked.drafter,
                report=asked.report,
                compare=asked.compare,
                prediction=asked.prediction,
                cache_salt=asked.cache_salt,
                priority=asked.priority,
                group=asked.group,
                siblings=siblings,
                private=asked.private,
                whole=asked.stream is None,
                skip_special_tokens=asked.skip_special_tokens,
                how=how,
            )
            for choice in range(asked.n)
        ]
    _check_together(asked, requests, card)
    echoed = [
        await _echo(asked, ids, all_ids, router, replace(base, input=source)) if asked.echo else ""
        for source, ids, all_ids in zip(asked.inputs, prompts, whole, strict=True)
    ]
    return Prepared(
        card=card,
        requests=tuple(requests),
        prompts=tuple(prompts),
        echoed=tuple(echoed),
        ignored=ignored,
        thinking=tuple(thinking),
    )


def _how_asked(base: HowAsked, asked: Asked, *, chats: bool) -> HowAsked:
    return replace(
        base,
        streams=asked.stream is not None,
        choices=asked.n,
        metadata=asked.metadata,
        system_prompt=system_prompt_of(asked.inputs[0]) if chats else "",
        tools=bool(asked.chat.tools),
    )


def _check_together(asked: Asked, requests: Sequence[ClientRequest], card: ModelCard) -> None:
    wanted, most = sum(request.sampling.max_tokens or 0 for request in requests), _CONTEXTS * card.max_model_len
    if wanted > most:
        raise Refused(asked.length_field, f"{wanted} for all choices", f"at most {most} for all choices together")


async def fitted(
    asked: Asked, router: RouterPort, aside: Aside, *, strict: bool
) -> tuple[ModelCard, Asked, tuple[str, ...]]:
    """The model, the request as it fits the model, and the names of fields that have no effect.

    Args:
        aside: makes checks that take long.
        strict: options that the chat template does not read are refused, not left out.

    Raises:
        OutriderError: there is no such model, or it cannot do what is asked.
    """
    card = called((await router.models())[0], asked.model)
    if strict and asked.left_out:
        raise asked.left_out[0]
    asked, ignored = readable(asked, card, strict=strict)
    check_tools(asked, card)
    check_infill(asked, card)
    asked, unlimited = limited(asked, card, strict=strict)
    left_out = tuple(each.field for each in asked.left_out)
    return card, asked, left_out + ignored + unlimited + await unused_form(asked, aside, strict=strict)


async def _tokenize(asked: Asked, router: RouterPort, request: ClientRequest, card: ModelCard) -> tuple[int, ...]:
    source = request.input

    def ids_of(messages: tuple[ChatMessage, ...]) -> Awaitable[tuple[int, ...]]:
        return router.tokenize(replace(request, input=messages))

    try:
        if asked.drops_oldest:
            most = card.max_model_len - (asked.sampling.max_tokens or 1)
            return await fitting(tuple(each for each in source if isinstance(each, ChatMessage)), ids_of, most)
        return await router.tokenize(request)
    except InvalidArgument as error:
        raise named(error, {"prompt": _field_of(source)}) from error


def _field_of(source: Input) -> str:
    return "messages" if source and isinstance(source, tuple) and not isinstance(source[0], int) else "prompt"


def _cut(asked: Asked, ids: tuple[int, ...], source: Input, card: ModelCard) -> tuple[int, ...]:
    """The tokens of a prompt that are kept.

    Raises:
        PromptTooLong: they leave no room for an answer.
    """
    if asked.truncate is not None:
        kept = card.max_model_len - (asked.sampling.max_tokens or 1) if asked.truncate == -1 else asked.truncate
        ids = ids[: max(1, kept)] if asked.truncates_end else ids[-max(1, kept) :]
    room_behind(len(ids), card.max_model_len, _field_of(source))
    return ids


def named(error: InvalidArgument, names: dict[str, str]) -> InvalidArgument:
    """The same error, with the request's own names of fields."""
    if isinstance(error, Refused):
        return error
    allowed = error.allowed
    for name, own in names.items():
        allowed = re.sub(rf"\b{re.escape(name)}\b", own, allowed)
    return renamed(error, names.get(error.field, error.field), allowed=allowed)


def own_names(asked: Asked) -> dict[str, str]:
    """What the request calls the fields that the router knows by other names. ``asked``: as it fits the model."""
    names = {"max_tokens": asked.length_field, "prompt_token_ids": "prompt"}
    form = asked.sampling.structured_outputs
    if form is not None:
        return {**names, field_of(form): asked.form_field, _GRAMMAR: asked.form_field}
    if asked.thought_limit is not None:
        return {**names, _GRAMMAR: LIMIT}
    return names if asked.tools is None else {**names, _GRAMMAR: "tools"}


async def _echo(
    asked: Asked, kept: tuple[int, ...], whole: tuple[int, ...], router: RouterPort, request: ClientRequest
) -> str:
    """The text of those tokens of a prompt that the model is shown.

    Args:
        kept: of all of them, ``whole``.
        request: asks for them.
    """
    first, end = 0, len(kept)
    if isinstance(request.input, str):
        if len(kept) == len(whole):
            return request.input
        cut = 0 if asked.truncates_end else len(whole) - len(kept)
        own = await _own(whole, router, request)
        first, end = max(0, own.start - cut), max(0, own.stop - cut)
    # An incomplete character at the end is told with the answer, which may complete it.
    return (await router.detokenize(kept[first:end])).rstrip("\ufffd")


async def _own(whole: tuple[int, ...], router: RouterPort, request: ClientRequest) -> range:
    """Which tokens of a text are its own. Those that the tokenizer puts around it are not, those that it names are."""
    bare = await router.tokenize(replace(request, add_special_tokens=False))
    starts = (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
    start = next(starts, None)
    return range(len(whole)) if start is None else range(start, start + len(bare))


def _completed(
    asked: Asked, card: ModelCard, prompt_length: int, allowed: int | None, *, thinking: bool
) -> RequestedSampling:
    sampling = formed(asked, card, thinking=thinking)
    defaults = SamplingDefaults() if sampling.ignore_generation_config else card.defaults
    if sampling.temperature is None and defaults.temperature is None:
        sampling = replace(sampling, temperature=_TEMPERATURE)
    room = room_behind(prompt_length, card.max_model_len)
    if sampling.max_tokens is None and defaults.max_tokens is None and defaults.max_length is None:
        most = longest_answer(None, room=room, most=allowed, otherwise=asked.default_max_tokens)
        sampling = replace(sampling, max_tokens=max(most, sampling.min_tokens or 0))
    if asked.clips_length and sampling.max_tokens is not None:
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
    try:
        check_fits(asked.length_field, sampling.max_tokens, room, card.max_model_len)
    except InvalidArgument as error:
        raise Refused(error.field, error.value, error.allowed, "context_length_exceeded") from error
    return sampling
