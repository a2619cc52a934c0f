"""HTTP requests that do not arrive: their connections are closed in time, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from services.api.config import HttpConfig, PublicServerConfig
from services.api.http import ops_listener
from services.api.http.server import serve_http
from tests.servers.scripted_router import ScriptedRouter

WAIT_S = 30
ARRIVES_S = 0.5
# Where connections that are there must not time out before the test has used them.
LATER_S = 3.0
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"messages": [{"role": "user", "content": "x"}]}'
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@asynccontextmanager
async def served(arrives_s: float = ARRIVES_S, **public: int) -> AsyncIterator[str]:
    config = HttpConfig(port=0, arrives_s=arrives_s, public=PublicServerConfig(port=0, **public))  # type: ignore[arg-type]
    server = await serve_http(ScriptedRouter("words"), config)
    try:
        yield server.address
    finally:
        await server.stop(0)


async def trickled(address: str, *parts: bytes, before: bytes = b"") -> tuple[bytes, float]:
    """Send ``parts`` byte by byte, and the last one again and again; returns the answer and when the connection ended."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    clock = asyncio.get_running_loop().time
    began = clock()
    writer.write(before)

    async def send() -> None:
        for byte in b"".join(parts):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.01)
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    try:
        answer = b""
        # What is sent to a closed connection resets it, which may be noticed after some of the answer was read.
        with suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while piece := await reader.read(4096):
                    answer += piece
        return answer, clock() - began
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize("start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nx-a: "], ids=["nothing", "line", "headers"])
async def test_headers_that_do_not_end(start: bytes) -> None:
    async with served() as address:
        answer, took = await trickled(address, start)
        assert answer == b""
        assert took >= 0.9 * ARRIVES_S


async def test_after_an_answer_as_at_the_beginning() -> None:
    async with served() as address:
        answer, _ = await trickled(address, b"GET /health HTTP/1.1\r\nx-a: ", before=HEALTH)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.exhaustive
async def test_a_body_that_does_not_end_is_answered() -> None:
    async with served() as address:
        answer, _ = await trickled(address, before=HEAD + b"content-length: 100000\r\n\r\n" + BODY)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body has not arrived within 0.5 s" in answer


async def test_others_are_answered_while_many_are_slow() -> None:
    async with served(max_connections=40) as address:
        slow = [asyncio.create_task(trickled(address, b"GET /")) for _ in range(30)]
        await asyncio.sleep(0.1)
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        head = HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(BODY)
        writer.write(head + BODY)
        answer = await asyncio.wait_for(reader.read(-1), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"words" in answer
        writer.close()
        assert all(found == b"" for found, _ in await asyncio.gather(*slow))


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection gives an answer to whether the server lives."""
    with suppress(ConnectionError):
        writer.write(HEALTH)
        return (await asyncio.wait_for(reader.read(4096), WAIT_S)).startswith(b"HTTP/1.1 200 OK")
    return False


@pytest.mark.exhaustive
async def test_only_connections_beyond_the_limit_are_closed() -> None:
    async with served(LATER_S, max_connections=3) as address:
        known = await opened(address)
        assert await answered(*known)
        silent = [await opened(address) for _ in range(2)]
        # Refused as it comes, not when it asks, and whoever is there already is answered.
        assert not await answered(*await opened(address))
        assert await answered(*known)
        for reader, _ in silent:
            assert await asyncio.wait_for(reader.read(1), WAIT_S) == b""
        assert await answered(*await opened(address))
        for _, writer in (known, *silent):
            writer.close()


async def test_no_address_keeps_others_out() -> None:
    async with served(LATER_S, max_connections=3) as address:
        host, port = address.rsplit(":", 1)
        silent = [await opened(address) for _ in range(3)]
        assert not await answered(*await opened(address))
        other = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
        assert await answered(*other)
        # It has taken the place of the first one.
        assert await asyncio.wait_for(silent[0][0].read(1), LATER_S / 2) == b""
        for _, writer in (other, *silent):
            writer.close()


@pytest.mark.exhaustive
async def test_where_descriptors_run_out_connections_wait_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async with served(LATER_S) as address:
        host, port = address.rsplit(":", 1)
        waiting = [socket.socket() for _ in range(3)]
        kept = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting[-1].fileno() + 1, kept[1]))
        filling = []
        with suppress(OSError):
            while True:
                filling.append(os.dup(0))
        try:
            for each in waiting:
                each.connect((host, int(port)))
            await asyncio.sleep(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, kept)
            for each in filling:
                os.close(each)
        for each in waiting:
            assert await answered(*await asyncio.open_connection(sock=each))
        told = [record for record in caplog.records if "files" in record.getMessage()]
        assert [record.name for record in told] == ["services.api.http.accepting"]
        for each in waiting:
            each.close()


@pytest.mark.exhaustive
async def test_silent_connections_do_not_keep_supervisors_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_listener, "_ARRIVES_S", LATER_S)
    monkeypatch.setattr(ops_listener, "_MOST_CONNECTIONS", 4)

    async def ready() -> bool:
        return True

    listener = await ops_listener.serve_ops("127.0.0.1", 0, lambda: b"", ready)
    known = await opened(listener.address)
    assert await answered(*known)
    silent = [await opened(listener.address) for _ in range(3)]
    assert not await answered(*await opened(listener.address))
    assert await answered(*known)
    for reader, writer in silent:
        assert await asyncio.wait_for(reader.read(1), WAIT_S) == b""
        writer.close()
    assert await answered(*await opened(listener.address))
    await listener.stop()


@pytest.mark.exhaustive
async def test_a_long_answer_is_no_slow_request() -> None:
    config = HttpConfig(port=0, arrives_s=ARRIVES_S, public=PublicServerConfig(port=0))
    router = ScriptedRouter("0123456789")
    router.waits = 0.15
    server = await serve_http(router, config)
    host, port = server.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"stream": true, "messages": [{"role": "user", "content": "x"}]}'
    writer.write(HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
    answer = await asyncio.wait_for(reader.read(-1), WAIT_S)
    assert b"[DONE]" in answer
    writer.close()
    await server.stop(0)


def whole_request(stream: bool) -> bytes:
    body = BODY[:-1] + (b', "stream": true}' if stream else b"}")
    return HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_no_more_to_say_gets_its_answer(stream: bool) -> None:
    router = ScriptedRouter("words")
    router.waits = 0.1
    server = await serve_http(router, HttpConfig(port=0, public=PublicServerConfig(port=0)))
    try:
        host, port = server.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole_request(stream))
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        writer.close()
        assert b"HTTP/1.1 200 OK" in answer and (b"[DONE]" if stream else b'"content":"words"') in answer
        assert router.left == 0
    finally:
        await server.stop(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_gone_is_noticed(stream: bool) -> None:
    router = ScriptedRouter("words")
    router.waits, router.forever = 0.05, True
    server = await serve_http(router, HttpConfig(port=0, public=PublicServerConfig(port=0)))
    try:
        host, port = server.address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole_request(stream))
        async with asyncio.timeout(WAIT_S):
            while not router.asked:
                await asyncio.sleep(0.01)
            writer.close()
            await writer.wait_closed()
            while not router.left:
                await asyncio.sleep(0.01)
    finally:
        await server.stop(0)
