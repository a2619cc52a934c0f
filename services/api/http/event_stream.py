"""Writes an answer as server-sent events.

Even on an encrypted connection, the sizes of events show how many drafted tokens were right, and so something about the
text (arXiv 2411.01076). As in OpenAI's API, events with text are filled up with a random ``obfuscation``, here to a
multiple of ``padding`` bytes. ``stream_interval`` hides the number of tokens as well.
"""

from __future__ import annotations

import asyncio
import random
import string
from typing import Any

from starlette.types import Send
from typing_extensions import override

from services.api.http.openai.errors import Headers
from services.api.http.written_json import write
from speculation.errors import Cancelled

# Seconds without an event after which a comment finds out whether the client is still there.
PING_S = 15.0

_HEADERS = [
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
]
_FIELD = ',"obfuscation":""'
_LETTERS = string.ascii_letters + string.digits


def event_bytes(content: bytes, padding: int | None = None, name: str = "") -> bytes:
    """An event of this JSON.

    Args:
        padding: fill it up to a multiple of so many bytes.
        name: the event's own; empty: it has none.
    """
    named = f"event: {name}\n".encode() if name else b""
    event = b"%sdata: %s\n\n" % (named, content)
    if padding is None:
        return event
    missing = -(len(event) + len(_FIELD)) % padding
    filler = "".join(random.choices(_LETTERS, k=missing))
    return event[:-3] + f',"obfuscation":"{filler}"'.encode() + event[-3:]


class EventStream:
    """An answer that is being streamed.

    Args:
        padding: bytes of which events with text are a multiple; None: they are as long as they are.
        everything: fill up events without text as well.
        stalled_s: seconds for the client to take an event; one that takes nothing must not hold its slot for ever.

    Attributes:
        begun: the status has been sent, so that errors are events from now on.
        last: what says that there are no more events; empty: their end alone.
    """

    last = b"data: [DONE]\n\n"
    content_type = "text/event-stream; charset=utf-8"

    def __init__(
        self, send: Send, headers: Headers, padding: int | None, stalled_s: float, *, everything: bool = False
    ) -> None:
        self._send_raw = send
        self._headers = headers
        self._padding = padding
        self._stalled_s = stalled_s
        self._everything = everything
        self.begun = False

    async def begin(self) -> None:
        """Send the status."""
        self.begun = True
        told = (("content-type", self.content_type), *_HEADERS, *self._headers)
        headers = [(name.encode(), value.encode()) for name, value in told]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, contents: list[dict[str, Any]]) -> None:
        """Send events; those with text are padded."""
        if contents:
            await self._write(b"".join([await self._event(content) for content in contents]))

    async def _event(self, content: dict[str, Any]) -> bytes:
        padding = self._padding if self._everything or self.has_text(content) else None
        return self.framed(await write(content), padding, self.name_of(content))

    def framed(self, content: bytes, padding: int | None, name: str) -> bytes:
        """An event as it is sent; arguments as of ``event_bytes``."""
        return event_bytes(content, padding, name)

    def has_text(self, content: dict[str, Any]) -> bool:
        """Whether an event tells of the answer's text."""
        return bool(content.get("choices"))

    def name_of(self, content: dict[str, Any]) -> str:
        """An event's name; empty: it has none."""
        return ""

    async def ping(self) -> None:
        """Send a comment, which clients skip."""
        await self._write(b": ping\n\n")

    async def fail(self, contents: list[dict[str, Any]]) -> None:
        """End the stream with an error, which clients raise."""
        await self.events(contents)
        await self.end()

    async def end(self) -> None:
        """End the stream."""
        if self.last:
            await self._write(self.last)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stalled_s):
                await self._send_raw(message)
        except TimeoutError:
            raise Cancelled(f"the client has taken nothing for {self._stalled_s:g} s (server.send_timeout_s)") from None


class NamedEvents(EventStream):
    """Events whose names are their types; the last one says that it is."""

    last = b""

    @override
    def name_of(self, content: dict[str, Any]) -> str:
        return str(content["type"])
