"""What each path does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from services.access.gate import Gate
from services.api.config import HttpConfig
from services.api.http.call import HttpCall
from services.api.http.event_stream import PING_S, EventStream
from services.api.http.json_body import read_body
from services.api.http.live_status import state_in_time, status_of
from services.api.http.model_list import listed, page_of
from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.chat_answer import ChatAnswer
from services.api.http.openai.chat_options import with_switch
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_answer import CompletionAnswer
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.errors import Headers, Refused
from services.api.http.openai.model_fit import Aside, called, of_a_tool
from services.api.http.openai.preparing import Prepared, expected, fitted, named, own_names, prepare
from services.api.http.openai.request import Asked
from services.api.http.openai.running_choices import RunningChoices
from services.api.http.openai.token_requests import read_detokenize, read_tokenize
from services.api.http.openai.usage import server_version
from services.api.http.ops_listener import TEXT
from services.api.http.page import DOCS, page
from services.api.lately import Lately
from services.api.messages import RouterPort, TokenSpelling
from services.api.model_card import ModelCard
from services.api.readiness import Readiness
from services.fair_threads import FairThreads
from services.logs.printable import printable_line
from speculation.errors import Cancelled, Internal, InvalidArgument, NotFound, OutriderError, Unavailable
from speculation.messages import ServiceState

log = logging.getLogger(__name__)

_Read = TypeVar("_Read")
# Makes the answer to a request, given the router, its name and its time in seconds.
Form = Callable[[Asked, Prepared, RouterPort, str, int], AnswerInProgress]
# Names fields of a request that had no effect.
_IGNORED, _MOST_NAMED = "x-outrider-ignored", 500


class Endpoints:
    """Answers calls from a router.

    Args:
        gate: holds a slot for each generation, and records calls.
        exposition: what ``metrics`` says; called in a thread.

    Attributes:
        running: the answers under way, and their generations.
    """

    def __init__(self, router: RouterPort, gate: Gate, config: HttpConfig, exposition: Callable[[], bytes]) -> None:
        self._router = router
        self._gate = gate
        self._config = config
        self._exposition = exposition
        self._readiness = Readiness(router)
        # Checks that take the grammars' engine long: not in the threads that all answers share.
        self._checks = FairThreads("checks", 1)
        self._started = int(time.time())
        self._ready = Lately(self._readiness.ready, False)
        self._state = Lately(partial(state_in_time, router), ServiceState())
        self.running: dict[AnswerInProgress, RunningChoices] = {}

    async def chat(self, call: HttpCall) -> None:
        """POST /v1/chat/completions"""
        asked = await self.read(call, read_chat)
        await call.unless_gone(self.generate(call, asked, ChatAnswer, "ChatCompletions"))

    async def completions(self, call: HttpCall) -> None:
        """POST /v1/completions"""
        asked = await self.read(call, read_completion)
        await call.unless_gone(self.generate(call, asked, CompletionAnswer, "Completions"))

    def aside(self, call: HttpCall) -> Aside:
        """Makes checks for a call; those of one tenant's calls hold up others' only once."""
        tenant = call.known_caller.tenant
        return lambda check: self._checks.run(check, 1, tenant)

    async def read(self, call: HttpCall, read: Callable[[dict[str, Any]], _Read]) -> _Read:
        """What ``read`` makes of the body, while its arrival counts for the key."""
        with self._gate.arriving(call.known_caller):
            return await read_body(call.receive, call.headers, self._config.arrives_s, read)

    def counted(self, call: HttpCall, method: str) -> AbstractContextManager[None]:
        """A call that needs what a generation needs, and writes no tokens.

        Raises:
            OutriderError: when it is entered: the key may not call, or has called too often.
        """
        return self._gate.counted(call.known_caller, method, call.request_id, scope="generate")

    async def generate(self, call: HttpCall, asked: Asked, form: Form, method: str) -> None:
        """Answer a request.

        Args:
            form: makes the answer.
            method: its name in the audit log.

        Raises:
            OutriderError: nothing has been sent.
        """
        if asked.request_id is not None and call.headers.get("x-request-id", asked.request_id) != asked.request_id:
            raise Refused("request_id", asked.request_id, "as the header x-request-id, or one of them unset")
        private = self._config.public.privacy.padding(asked.private)
        if private is not None and asked.stream is not None and not asked.stream.include_obfuscation:
            named_as = "stream_options.include_obfuscation"
            raise Refused(named_as, False, "true, or unset: events of private answers are padded")
        base, counted_as, fits = call.base_request(asked.request_id), "n" if asked.n > 1 else "prompt", asked
        try:
            # Before the prompts are read, which takes longer than to refuse a caller.
            async with self._gate.hold(
                call.known_caller, expected(asked, base), method=method, counted_as=counted_as
            ) as slots:
                strict = self._config.unknown_fields == "refuse"
                card, fits, ignored = await fitted(asked, self._router, self.aside(call), strict=strict)
                prepared = await prepare(fits, card, self._router, base, ignored)
                slots.charge(prepared.requests)
                answer = form(asked, prepared, self._router, call.request_id, int(time.time()))
                async with RunningChoices(self._router, prepared.requests, slots.admit) as running:
                    await self._told(call, asked, running, answer, private)
        except InvalidArgument as error:
            raise named(await of_a_tool(asked, error, self.aside(call)), own_names(fits)) from error

    async def tokens_of(self, call: HttpCall, asked: Asked) -> int:
        """How many tokens a conversation has as it is sent to the model.

        Raises:
            OutriderError: it cannot be sent.
        """
        _, fits, _ = await fitted(asked, self._router, self.aside(call), strict=self._config.unknown_fields == "refuse")
        request = replace(call.base_request(None), input=fits.inputs[0], chat=fits.chat)
        try:
            return len(await call.unless_gone(self._router.tokenize(request)))
        except InvalidArgument as error:
            raise named(error, {"prompt": "messages"}) from error

    async def _told(
        self, call: HttpCall, asked: Asked, running: RunningChoices, answer: AnswerInProgress, private: int | None
    ) -> None:
        """Send the answer. ``private``: bytes of which each of its events is a multiple; None: it is not private."""
        self.running[answer] = running
        try:
            if asked.stream is None:
                await self._whole(call, running, answer)
            else:
                padding = private or (self._config.padding if asked.stream.include_obfuscation else None)
                stream = answer.stream_form(
                    call.send, _ignored(answer), padding, self._config.public.send_timeout_s, everything=private is not None
                )
                await self._streamed(call, stream, running, answer, usage=asked.stream.include_usage)
        finally:
            del self.running[answer]

    async def _whole(self, call: HttpCall, running: RunningChoices, answer: AnswerInProgress) -> None:
        while not running.over:
            if (told := await running.next()) is not None:
                answer.take(*told)
        await call.answer(await answer.whole(), headers=_ignored(answer))

    async def _streamed(
        self, call: HttpCall, stream: EventStream, running: RunningChoices, answer: AnswerInProgress, *, usage: bool
    ) -> None:
        # What fails before the first token is an HTTP status, unless that token takes long.
        told = await running.next(PING_S)
        await stream.begin()
        await stream.events(answer.opening())
        try:
            while True:
                if told is None:
                    await stream.ping()
                else:
                    await stream.events(await answer.add(*told))
                if running.over:
                    break
                told = await running.next(PING_S)
            if usage:
                await stream.events([answer.closing()])
            await stream.end()
        except Cancelled:
            # Who has taken nothing for so long takes no error either.
            raise
        except OutriderError as error:
            await stream.fail(await answer.failed(error) or [call.error_body(error)])
        except Exception:
            log.exception("the stream of request %s failed", call.log_name)
            internal = Internal("internal error; the server's log says why")
            await stream.fail(await answer.failed(internal) or [call.error_body(internal)])

    async def stop(self) -> None:
        """End what goes on beside requests."""
        self._checks.stop()
        await self._readiness.stop()

    async def models(self, call: HttpCall) -> None:
        """GET /v1/models"""
        await call.answer(page_of(await self.listed(call), dict(call.query)))

    async def model(self, call: HttpCall) -> None:
        """GET /v1/models/{id}"""
        models = await self.listed(call)
        if call.path_id not in models:
            raise NotFound("model", call.path_id or "empty", ", ".join(models))
        await call.answer(models[call.path_id])

    async def listed(self, call: HttpCall) -> dict[str, dict[str, Any]]:
        """What is told of each model, by each of its names."""
        caller = call.known_caller
        return listed(await self._router.models(caller.tenant), caller, self._started)

    async def tokenize(self, call: HttpCall) -> None:
        """POST /tokenize: of a text, or of a conversation as it is sent to the model."""
        model, request, names = await self.read(call, read_tokenize)
        card = await self.card(model)
        request = replace(request, tenant=call.known_caller.tenant, chat=with_switch(request.chat, card))
        ids = await call.unless_gone(self._router.tokenize(request))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": list(ids)}
        spelt = await asyncio.to_thread(_names_of, await self._router.spell(ids)) if names else None
        await call.answer({**found, "token_strs": spelt})

    async def detokenize(self, call: HttpCall) -> None:
        """POST /detokenize"""
        model, ids = await self.read(call, read_detokenize)
        await self.card(model)
        await call.answer({"prompt": await call.unless_gone(self._router.detokenize(ids))})

    async def card(self, model: str | None) -> ModelCard:
        """The model by the name that a request calls it; None: by its first one.

        Raises:
            NotFound: it has no such name.
        """
        return called((await self._router.models())[0], model)

    async def status(self, call: HttpCall) -> None:
        """GET /v1/outrider/status: the load, and what all requests add up to where the key may see that."""
        await call.answer(status_of(await self._state(), whole="observe" in call.known_caller.scopes))

    async def metrics(self, call: HttpCall) -> None:
        """GET /metrics: the sums over all requests, for Prometheus."""
        self._gate.require(call.known_caller, "observe")
        await call.answer_bytes(await asyncio.to_thread(self._exposition), [("content-type", TEXT)])

    async def page(self, call: HttpCall) -> None:
        """GET /: the page for browsers."""
        await call.answer_bytes(*page())

    async def docs(self, call: HttpCall) -> None:
        """GET /docs: what each path takes and answers, for browsers."""
        await call.answer_bytes(*page(DOCS))

    async def health(self, call: HttpCall) -> None:
        """GET /health: this process answers."""
        await call.answer({"status": "ok"})

    async def ready(self, call: HttpCall) -> None:
        """GET /ready: a request would be answered."""
        if not await self._ready():
            raise Unavailable("no verifier answers; try again")
        await call.answer({"status": "ok"})

    async def live(self, call: HttpCall) -> None:
        """GET /v2/health/live: as /health, by the open inference protocol."""
        await call.answer({"live": True})

    async def ready_by_protocol(self, call: HttpCall) -> None:
        """GET /v2/health/ready: as /ready, by the open inference protocol."""
        if not await self._ready():
            raise Unavailable("no verifier answers; try again")
        await call.answer({"ready": True})

    async def version(self, call: HttpCall) -> None:
        """GET /version"""
        await call.answer({"version": server_version()})


class EndpointsBeside:
    """Answers calls of other APIs.

    Args:
        endpoints: those of OpenAI's API, which generate.
        strict: options that the chat template does not read are refused, not left out.
    """

    def __init__(self, endpoints: Endpoints, router: RouterPort, *, strict: bool) -> None:
        self._endpoints = endpoints
        self._router = router
        self._strict = strict


def _ignored(answer: AnswerInProgress) -> Headers:
    # They are a client's own: a header holds no others' line ends, and not megabytes.
    names = printable_line(", ".join(answer.ignored), _MOST_NAMED).encode("ascii", "backslashreplace").decode()
    return [(_IGNORED, names)] if names else []


def _names_of(tokens: Sequence[TokenSpelling]) -> list[str]:
    return [token.data.decode(errors="replace") for token in tokens]
