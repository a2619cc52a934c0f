"""Makes one request for each choice of a body, and runs them side by side."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace

from services.access.gate import Visit
from services.api.http.openai.chat_options import LIMIT
from services.api.http.openai.errors import Refused
from services.api.http.openai.model_fit import called, check_infill, check_tools, formed, limited, readable, unused_form
from services.api.http.openai.oldest_turns import fitting
from services.api.http.openai.prompt_thought import begins_thought
from services.api.http.openai.request import Asked, Input
from services.api.messages import (
    ChatMessage,
    ChatOptions,
    ClientRequest,
    Completion,
    HowAsked,
    RequestedSampling,
    RouterPort,
    TextChunk,
    system_prompt_of,
)
from services.api.model_card import ModelCard
from services.structured_outputs.grammars import field_of
from speculation.errors import Internal, InvalidArgument, OutriderError
from speculation.room import check_fits, longest_answer, room_behind
from speculation.types import SamplingDefaults

Event = TextChunk | Completion
Admit = Callable[[ClientRequest], AbstractAsyncContextManager[Visit]]

# Of OpenAI's API, for requests that do not say.
_TEMPERATURE = 1.0
# A request's answers may together have so many times the tokens of the context.
_CONTEXTS = 16
# Events of a request that may wait for a slow reader before its generations wait, too.
_AHEAD = 64
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


async def prepare(asked: Asked, router: RouterPort, base: ClientRequest, *, strict: bool = False) -> Prepared:
    """Complete a request with the defaults of OpenAI's API and of the model.

    Every prompt is tokenised once, for all of its choices.

    Args:
        base: tenant, request id, trace, and the longest answer that its caller may have.
        strict: options that the chat template does not read are refused, not left out.

    Raises:
        OutriderError: the request cannot be served; names the field as the request spells it.
    """
    card, asked, ignored = await fitted(asked, router, strict=strict)
    if asked.compare and (answers := asked.n * len(asked.inputs)) > 1:
        raise Refused("speculation.compare", ", ".join(asked.compare), f"unset where a request has {answers} answers")
    prompts = [
        await _tokenize(asked, router, replace(base, input=source, chat=asked.chat, infill=asked.infill), card)
        for source in asked.inputs
    ]
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
    echoed = [await _echo(source, router) if asked.echo else "" for source in asked.inputs]
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


async def fitted(asked: Asked, router: RouterPort, *, strict: bool) -> tuple[ModelCard, Asked, tuple[str, ...]]:
    """The model, the request as it fits the model, and the names of fields that have no effect.

    Args:
        strict: as of ``prepare``.

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
    return card, asked, left_out + ignored + unlimited + await unused_form(asked, strict=strict)


async def _tokenize(asked: Asked, router: RouterPort, request: ClientRequest, card: ModelCard) -> tuple[int, ...]:
    source = request.input
    field = "messages" if source and isinstance(source, tuple) and not isinstance(source[0], int) else "prompt"

    def ids_of(messages: tuple[ChatMessage, ...]) -> Awaitable[tuple[int, ...]]:
        return router.tokenize(replace(request, input=messages))

    try:
        if asked.drops_oldest:
            most = card.max_model_len - (asked.sampling.max_tokens or 1)
            ids = await fitting(tuple(each for each in source if isinstance(each, ChatMessage)), ids_of, most)
        else:
            ids = await router.tokenize(request)
    except InvalidArgument as error:
        raise named(error, {"prompt": field}) from error
    if asked.truncate is not None:
        kept = card.max_model_len - (asked.sampling.max_tokens or 1) if asked.truncate == -1 else asked.truncate
        ids = ids[: max(1, kept)] if asked.truncates_end else ids[-max(1, kept) :]
    room_behind(len(ids), card.max_model_len, field)
    return ids


def named(error: InvalidArgument, names: dict[str, str]) -> InvalidArgument:
    """The same error, with the request's own names of fields."""
    if isinstance(error, Refused):
        return error
    allowed = error.allowed
    for name, own in names.items():
        allowed = re.sub(rf"\b{re.escape(name)}\b", own, allowed)
    return type(error)(names.get(error.field, error.field), error.value, allowed)


def own_names(asked: Asked) -> dict[str, str]:
    """What the request calls the fields that the router knows by other names."""
    names = {"max_tokens": asked.length_field, "prompt_token_ids": "prompt"}
    form = asked.sampling.structured_outputs
    if form is not None:
        return {**names, field_of(form): asked.form_field, _GRAMMAR: asked.form_field}
    if asked.thought_limit is not None:
        return {**names, _GRAMMAR: LIMIT}
    return names if asked.tools is None else {**names, _GRAMMAR: "tools"}


async def _echo(source: Input, router: RouterPort) -> str:
    if isinstance(source, str):
        return source
    # An incomplete character at the end is told with the answer, which may complete it.
    return (await router.detokenize([each for each in source if isinstance(each, int)])).rstrip("\ufffd")


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


class RunningChoices:
    """The generations of a request's choices, during a block. Leaving it cancels those that go on.

    Args:
        admit: holds a slot for a generation; raises where there is none.
    """

    def __init__(self, router: RouterPort, requests: Sequence[ClientRequest], admit: Admit) -> None:
        self._router = router
        self._requests = requests
        self._admit = admit
        self._events: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue(_AHEAD)
        self._left = len(requests)
        self._failure: OutriderError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RunningChoices:
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._requests))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return self._left == 0

    async def next(self, within_s: float | None = None) -> tuple[int, Event] | None:
        """The next event of any choice, with the choice's index; None: there was none in time.

        Raises:
            OutriderError: a generation has failed; the others are of no use then.
        """
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(within_s):
                index, event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        self._left -= isinstance(event, Completion)
        return index, event

    def fail(self, error: OutriderError) -> None:
        """Have ``next`` raise an error."""
        self._failure = error
        with suppress(asyncio.QueueFull):
            self._events.put_nowait((0, error))

    async def _run(self, index: int) -> None:
        try:
            async with self._admit(self._requests[index]) as visit:
                await self._follow(index, visit)
        except Exception as error:
            await self._events.put((index, error))

    async def _follow(self, index: int, visit: Visit) -> None:
        events: AsyncGenerator[Event, None] = self._router.generate(visit.request)
        try:
            async for event in events:
                visit.note(event)
                await self._events.put((index, event))
                if isinstance(event, Completion):
                    return
        finally:
            await events.aclose()
        raise Internal("the router ended without a result")
