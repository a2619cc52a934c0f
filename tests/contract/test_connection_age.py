"""Connections that have grown old take no further calls, and lose none: over HTTP the answer says so, over gRPC a frame."""

from __future__ import annotations

import asyncio
import struct
import time

import httpx2

from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc.server import serve_public
from services.api.http.server import serve_http
from tests.servers.scripted_router import ScriptedRouter

_AGE_S = 1.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">IBI", 0 << 8 | 4, 0, 0)
_GOAWAY = 7
BODY = {"messages": [{"role": "user", "content": "fox"}]}


async def test_an_old_http_connection_ends_with_an_answer() -> None:
    config = HttpConfig(port=0, public=PublicServerConfig(port=0, max_connection_age_s=_AGE_S))
    router = ScriptedRouter("hello")
    server = await serve_http(router, config)
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            begun = time.monotonic()
            closed = []
            while time.monotonic() < begun + 2 * _AGE_S:
                answer = await client.post("/v1/chat/completions", json=BODY)
                assert answer.json()["choices"][0]["message"]["content"] == "hello"
                closed.append((time.monotonic() - begun, answer.headers.get("connection")))
                await asyncio.sleep(0.05)
            # A new connection is young again.
            ended = [after for after, said in closed if said == "close"]
            assert ended and ended[0] > 0.9 * _AGE_S and len(ended) <= 2
            assert all(said is None for after, said in closed if after < 0.9 * _AGE_S)
            # What is under way goes on.
            router.waits = 0.5
            text = (await client.post("/v1/chat/completions", json={**BODY, "stream": True})).text
            assert text.endswith("data: [DONE]\n\n")
    finally:
        await server.stop(0)


async def test_an_old_grpc_connection_is_told_to_go() -> None:
    server = await serve_public(ScriptedRouter("hello"), PublicServerConfig(port=0, max_connection_age_s=_AGE_S))
    try:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        begun = time.monotonic()
        writer.write(_PREFACE)
        while True:
            head = await asyncio.wait_for(reader.readexactly(9), 10)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == _GOAWAY:
                break
        assert 0.8 * _AGE_S < time.monotonic() - begun < 10
        writer.close()
    finally:
        await server.stop(0)
