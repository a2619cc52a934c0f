"""The doors of a service: gRPC and HTTP, each for streams and for whole answers."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import outrider
from benchmarks.soak.exchanges import LEFT, WHOLE, SoakExchange

# An answer that has not ended by then has no end.
NO_END_S = 120.0
DOORS = ("gRPC stream", "gRPC whole", "HTTP stream", "HTTP whole")


@dataclass(frozen=True, kw_only=True, slots=True)
class Doors:
    """Where the service is asked.

    Attributes:
        waiting: threads in which HTTP's answers are waited for.
    """

    grpc: str
    http: str
    waiting: Executor

    async def ask(self, exchange: SoakExchange, key: str, leaves_after: int | None = None) -> None:
        """Ask, and note all that is seen.

        Args:
            key: the API key.
            leaves_after: pieces after which the user leaves; 0: before the first one has come.
        """
        if exchange.door.startswith("gRPC"):
            await self._grpc(exchange, key, leaves_after)
        else:
            leaves = 1 << 60 if leaves_after is None else leaves_after
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.waiting, _ask_http, self.http, exchange, key, leaves)

    async def _grpc(self, exchange: SoakExchange, key: str, leaves_after: int | None) -> None:
        retry = outrider.Retry(attempts=1)
        try:
            async with asyncio.timeout(NO_END_S), outrider.AsyncClient(self.grpc, api_key=key, retry=retry) as client:
                end = await _stream(client, exchange, leaves_after)
            exchange.over(end)
        except TimeoutError:
            exchange.over("no end", f"for {NO_END_S:g} s")
        except outrider.OutriderError as error:
            exchange.over(type(error).__name__, str(error))


async def _stream(client: outrider.AsyncClient, exchange: SoakExchange, leaves_after: int | None) -> str:
    options: Any = {**exchange.request.options, "strategy": exchange.strategy}
    if not exchange.streamed:
        exchange.show((await client.generate(token_ids=exchange.request.token_ids, **options)).token_ids)
        return WHOLE
    async with client.stream(token_ids=exchange.request.token_ids, **options) as stream:
        if leaves_after == 0:
            return LEFT
        async for chunk in stream:
            if chunk.token_ids:
                exchange.show(chunk.token_ids)
            if len(exchange.arrivals) == leaves_after:
                return LEFT
    return WHOLE


def _ask_http(address: str, exchange: SoakExchange, key: str, leaves_after: int) -> None:
    connection = http.client.HTTPConnection(address, timeout=NO_END_S)
    try:
        _converse(connection, exchange, key, leaves_after)
    except TimeoutError:
        exchange.over("no end", f"for {NO_END_S:g} s")
    except (OSError, http.client.HTTPException) as error:
        # An answer in chunks says where it ends: one that is cut off cannot be taken for a whole one.
        exchange.over("connection lost", f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _converse(connection: http.client.HTTPConnection, exchange: SoakExchange, key: str, leaves_after: int) -> None:
    body: dict[str, Any] = {
        **exchange.request.options,
        "prompt": exchange.request.token_ids,
        "stream": exchange.streamed,
        "return_token_ids": True,
        "speculation": {"strategy": exchange.strategy},
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "host": "localhost"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    if leaves_after == 0:
        exchange.over(LEFT)
        return
    answer = connection.getresponse()
    if answer.status != 200:
        exchange.over(f"HTTP {answer.status}", answer.read().decode(errors="replace")[:500])
    elif not exchange.streamed:
        exchange.show(json.loads(answer.read())["choices"][0]["token_ids"])
        exchange.over(WHOLE)
    else:
        _read_events(_events(answer), exchange, leaves_after)


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().strip()


def _read_events(events: Iterator[str], exchange: SoakExchange, leaves_after: int) -> None:
    for event in events:
        if event == "[DONE]":
            # An error comes before it.
            if not exchange.ends:
                exchange.over(WHOLE)
            return
        found = json.loads(event)
        if "error" in found:
            exchange.over(f"HTTP {found['error'].get('code') or 'internal'}", str(found["error"].get("message")))
            continue
        for choice in found["choices"]:
            if choice.get("token_ids"):
                exchange.show(choice["token_ids"])
        if len(exchange.arrivals) == leaves_after:
            exchange.over(LEFT)
            return
    if not exchange.ends:
        exchange.over("connection lost", "the stream ended before [DONE]")
