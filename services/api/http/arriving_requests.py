"""uvicorn's protocol for HTTP/1.1, with limits on connections and on how long a request may take to arrive.

uvicorn itself waits for ever for the rest of a request's headers: a few hundred clients that send a byte a minute would take
all connections. And its own limit on them refuses every request while it is reached, also on connections that are there.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds beyond the limit that the application has to answer a late body with an error.
_ANSWER_S = 2.0


def arriving_within(seconds: float, most_connections: int) -> type[asyncio.Protocol]:
    """The protocol that closes connections whose request's headers, and then its body, take longer than ``seconds``.

    Args:
        most_connections: of a server, idle ones included; further ones are closed as they come.
    """
    limits = {"arrives_s": seconds, "most_connections": most_connections}
    return cast(type[asyncio.Protocol], type("_Arriving", (_Arriving,), limits))


class _Arriving(H11Protocol):
    arrives_s = 0.0
    most_connections = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._state: Any = None
        self._surplus = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.most_connections:
            self._surplus = True
            transport.abort()
            return
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if not self._surplus:
            super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin to wait for headers or for a body; a byte of them does not begin it anew."""
        state = self.conn.their_state
        if state is self._state:
            return
        self._state = state
        self._stop()
        if state is h11.IDLE:
            self._timer = self.loop.call_later(self.arrives_s, self.transport.abort)
        elif state is h11.SEND_BODY:
            self._timer = self.loop.call_later(self.arrives_s + _ANSWER_S, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
