"""Answers a request that generates: holds its slot, runs its choices, and sends what they say, whole or in events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from services.access.gate import Gate
from services.api.config import HttpConfig
from services.api.http.call import HttpCall
from services.api.http.event_stream import PING_S, EventStream
from services.api.http.json_body import read_body
from services.api.http.openai.choice_record import AnswerInProgress
from services.api.http.openai.errors import Headers, Refused
from services.api.http.openai.generation import Prepared, RunningChoices, expected, named, own_names, prepare
from services.api.http.openai.model_fit import of_a_tool
from services.api.http.openai.request import Asked
from services.api.messages import RouterPort
from speculation.errors import Internal, InvalidArgument, OutriderError, Unavailable

log = logging.getLogger(__name__)

_Read = TypeVar("_Read")
# Makes the answer to a request that is prepared: the last two are its name and the Unix time in seconds.
Form = Callable[[Asked, Prepared, RouterPort, str, int], AnswerInProgress]
# Names fields of a request that had no effect.
_IGNORED = "x-outrider-ignored"


class Answering:
    """Reads and answers requests that generate, in the form of any API.

    Args:
        gate: holds a slot for each generation, and records calls.
    """

    def __init__(self, router: RouterPort, gate: Gate, config: HttpConfig) -> None:
        self._router = router
        self._gate = gate
        self._config = config
        self._running: dict[AnswerInProgress, RunningChoices] = {}

    async def read(self, call: HttpCall, read: Callable[[dict[str, Any]], _Read]) -> _Read:
        """What ``read`` makes of the call's body.

        Raises:
            OutriderError: as ``read_body``, or the key has too many calls whose content arrives.
        """
        with self._gate.arriving(call.known_caller):
            return await read_body(call.receive, call.headers, self._config.arrives_s, read)

    async def answer(self, call: HttpCall, asked: Asked, form: Form, method: str) -> None:
        """Generate what is asked for, and send it; the end of the client's connection ends it.

        Args:
            method: its name in the audit log.

        Raises:
            OutriderError: it cannot be answered; nothing has been sent.
        """
        await call.unless_gone(self._generate(call, asked, form, method))

    def end(self, answer: AnswerInProgress, error: OutriderError) -> None:
        """End an answer with an error; if it goes on."""
        if (running := self._running.get(answer)) is not None:
            running.fail(error)

    def end_all(self) -> None:
        """End every answer that goes on, since the server stops."""
        for running in tuple(self._running.values()):
            running.fail(Unavailable("the server is stopping; try again"))

    async def _generate(self, call: HttpCall, asked: Asked, form: Form, method: str) -> None:
        if asked.request_id is not None and call.headers.get("x-request-id", asked.request_id) != asked.request_id:
            raise Refused("request_id", asked.request_id, "as the header x-request-id, or one of them unset")
        private = self._config.public.privacy.padding(asked.private)
        if private is not None and asked.stream is not None and not asked.stream.include_obfuscation:
            named_as = "stream_options.include_obfuscation"
            raise Refused(named_as, False, "true, or unset: events of private answers are padded")
        base, counted_as = call.base_request(asked.request_id), "n" if asked.n > 1 else "prompt"
        try:
            # Before the prompts are read, which takes longer than to refuse a caller.
            async with self._gate.hold(
                call.known_caller, expected(asked, base), method=method, counted_as=counted_as
            ) as slots:
                prepared = await prepare(asked, self._router, base, strict=self._config.unknown_fields == "refuse")
                slots.charge(prepared.requests)
                answer = form(asked, prepared, self._router, call.request_id, int(time.time()))
                async with RunningChoices(self._router, prepared.requests, slots.admit) as running:
                    await self._told(call, asked, running, answer, private)
        except InvalidArgument as error:
            raise named(await asyncio.to_thread(of_a_tool, asked, error), own_names(asked)) from error

    async def _told(
        self, call: HttpCall, asked: Asked, running: RunningChoices, answer: AnswerInProgress, private: int | None
    ) -> None:
        """Send the answer. ``private``: bytes of which each of its events is a multiple; None: it is not private."""
        self._running[answer] = running
        try:
            if asked.stream is None:
                await self._whole(call, running, answer)
            else:
                padding = private or (self._config.padding if asked.stream.include_obfuscation else None)
                stream = EventStream(
                    call.send, _ignored(answer), padding, self._config.public.send_timeout_s, everything=private is not None
                )
                await self._streamed(call, stream, running, answer, usage=asked.stream.include_usage)
        finally:
            del self._running[answer]

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
        except OutriderError as error:
            await stream.events(await answer.failed(error))
        except Exception:
            log.exception("the stream of request %s failed", call.log_name)
            await stream.events(await answer.failed(Internal("internal error; the server's log says why")))
        await stream.end(done=answer.says_done)


def _ignored(answer: AnswerInProgress) -> Headers:
    names = answer.ignored
    return [(_IGNORED, ", ".join(names))] if names else []
