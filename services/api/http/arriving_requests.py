"""uvicorn's protocol for HTTP/1.1, with limits on how long a request may take to arrive.

uvicorn itself waits for ever for the rest of a request's headers: a few hundred clients that send a byte a minute would take
all connections. And its own limit on them refuses every request while it is reached, also on connections that are there.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, cast

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.api.http.connections import ConnectionPlace

# Seconds for the headers of a connection's first request, at most: nobody knows yet who it is.
_FIRST_S = 10.0
# An answer that is not one yet (RFC 9110, 15.2): clients skip it, and one that is gone refuses it.
_GO_ON = b"HTTP/1.1 102 Processing\r\n\r\n"
# Seconds between two of them: the first draws the refusal, which the second then meets.
_PROBES_S = (0.1, 5.0)
# Shares of a connection's age.
_SPREAD = (0.9, 1.1)
_CLOSE = (b"connection", b"close")
# Seconds beyond the limit that the application has to answer a late body with an error.
_ANSWER_S = 2.0


def arriving_within(seconds: float, age_s: float = math.inf) -> type[asyncio.Protocol]:
    """The protocol that closes connections whose request's headers, and then its body, take longer than ``seconds``.

    Args:
        age_s: about how long a connection is kept for further requests.
    """
    return cast(type[asyncio.Protocol], type("_Arriving", (Arriving,), {"arrives_s": seconds, "age_s": age_s}))


class Arriving(H11Protocol):
    """One connection.

    Attributes:
        place: its own, which it gives up for others while it waits for a request; set before it is made.
    """

    arrives_s = 0.0
    age_s = math.inf
    place: ConnectionPlace

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._state: Any = None
        # Connections that came together do not end together.
        self._grows_old = self.loop.time() + self.age_s * random.uniform(*_SPREAD)
        self._answered = False
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._prober: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    @override
    def data_received(self, data: bytes) -> None:
        asked = self.cycle
        super().data_received(data)
        if self.cycle is not asked and self.loop.time() > self._grows_old:
            # As if the client had asked for it: the answer says that the connection ends with it.
            self.scope["headers"] = [*self.scope["headers"], _CLOSE]
        self._watch()

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that only has no more to say: it waits for its answer.

        One that is gone looks the same, until it is sent something.
        """
        whole = self.cycle is not None and self.conn.their_state is not h11.SEND_BODY
        # A connection in TLS ends with its first half.
        waits = whole and not self.cycle.response_complete and self.transport.get_extra_info("sslcontext") is None
        if waits:
            self._half_closed = True
            self._probe(*_PROBES_S)
        return waits

    def _probe(self, after_s: float, then_s: float) -> None:
        if self.cycle is None or self.cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(_GO_ON)
        self._prober = self.loop.call_later(after_s, self._probe, then_s, then_s)

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered = True
        if self._half_closed:
            self.transport.close()
        self._watch()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if self._prober is not None:
            self._prober.cancel()
        self.place.release()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin to wait for headers or for a body; a byte of them does not begin it anew."""
        state = self.conn.their_state
        if state is self._state:
            return
        self._state = state
        self._stop()
        self.place.give_way = self.transport.abort if state is h11.IDLE else None
        if state is h11.IDLE:
            seconds = self.arrives_s if self._answered else min(self.arrives_s, _FIRST_S)
            self._timer = self.loop.call_later(seconds, self.transport.abort)
        elif state is h11.SEND_BODY:
            self._timer = self.loop.call_later(self.arrives_s + _ANSWER_S, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
