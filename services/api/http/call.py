"""One HTTP request while it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from services.access.gate import Caller, Gate
from services.api.http.door import OPENAI, Door
from services.api.http.openai.errors import Headers as HeaderList
from services.api.http.openai.errors import error_headers, http_status
from services.api.http.written_json import write
from services.api.messages import ClientRequest, HowAsked, RequestedSampling
from services.api.told_headers import told_headers
from services.logs.names import UsersName
from speculation.errors import Cancelled, Internal, OutriderError

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class HttpCall:
    """A request, and how to answer it.

    Attributes:
        path_id: the id in its path, if it has one.
        query: the parameters behind the path.
        request_id: goes into every answer.
        address: where it comes from.
        caller: whose request it is; None: nobody has asked.
        begun: the answer's status has been sent.
        door: the API that it speaks.
    """

    headers: Headers
    receive: Receive
    send_raw: Send
    address: str
    gate: Gate
    path_id: str = ""
    query: Sequence[tuple[str, str]] = ()
    request_id: str = ""
    traceparent: str = ""
    caller: Caller | None = None
    begun: bool = False
    door: Door = OPENAI

    @property
    def known_caller(self) -> Caller:
        """Whose request it is, on paths that are not open to everybody."""
        if self.caller is None:
            raise Internal("the caller has not been asked for its key")
        return self.caller

    @property
    def log_name(self) -> str:
        """What the log calls it."""
        return UsersName(self.request_id, self.traceparent)

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.begun = True
            named = [(name.encode(), self.request_id.encode()) for name in self.door.id_headers]
            rates = {} if self.caller is None else self.gate.rates(self.caller)
            limits = [(name.encode(), value.encode()) for name, value in rates.items()]
            message["headers"] = [*message.get("headers", []), *named, *limits]
        await self.send_raw(message)

    async def answer(self, content: Any, status: int = 200, headers: HeaderList | None = None) -> None:
        """Send the whole answer, as JSON."""
        await self.answer_bytes(await write(content), [("content-type", "application/json"), *(headers or [])], status)

    async def answer_bytes(self, body: bytes, headers: HeaderList, status: int = 200) -> None:
        """Send the whole answer, of the content type that its headers say."""
        shown = [*headers, ("content-length", str(len(body)))]
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in shown]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": body})

    def error_body(self, error: OutriderError) -> dict[str, Any]:
        """The JSON of an answer, or of the last event of one, that is an error."""
        return self.door.error(error, self.request_id)

    async def refuse(self, error: OutriderError, headers: HeaderList | None = None) -> None:
        """Send an error as the answer, with ``headers`` besides its own."""
        await self.answer(self.error_body(error), http_status(error), [*error_headers(error), *(headers or [])])

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled if the client goes first. The request's body has been read.

        Raises:
            Cancelled: the client has gone.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Cancelled("the client has gone")
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def base_request(self, request_id: str | None) -> ClientRequest:
        """What the router is told of the call, with nothing to generate yet.

        Args:
            request_id: the body's own name for the request, if it has one.
        """
        self.request_id = request_id or self.request_id
        return ClientRequest(
            input="",
            sampling=RequestedSampling(),
            tenant=self.known_caller.tenant,
            most_tokens=self.known_caller.limits.max_tokens,
            request_id=self.request_id,
            traceparent=self.traceparent,
            how=HowAsked(headers=told_headers(self.headers.items())),
        )
