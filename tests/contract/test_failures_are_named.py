"""JSON logs name the request that a failure of ours ended, over HTTP and over gRPC."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx2
import pytest
from typing_extensions import override

import outrider
from cluster.process.logs import JsonLines
from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc.server import serve_public
from services.api.http.server import serve_http
from services.api.messages import ClientRequest, Completion, TextChunk
from tests.servers.scripted_router import ScriptedRouter

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Broken(ScriptedRouter):
    """Has a mistake, after one piece of the answer."""

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        yield TextChunk(text="x", token_ids=(120,))
        raise ValueError("planted")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(JsonLines())
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def failures(lines: io.StringIO) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in found if line.get("error") == "ValueError"]


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http(lines: io.StringIO, stream: bool) -> None:
    server = await serve_http(Broken(), HttpConfig(port=0))
    headers = {"x-request-id": "mine.0123abcd", "traceparent": TRACE}
    async with httpx2.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
        answer = await client.post("/v1/completions", json={"prompt": "fox", "stream": stream})
        assert "internal error" in answer.text
    await server.stop(0)
    (line,) = failures(lines)
    assert (line["request_id"], line["trace"]) == ("mine.0123abcd", TRACE[3:35])


async def test_over_grpc(lines: io.StringIO) -> None:
    server = await serve_public(Broken(), PublicServerConfig(port=0))
    async with outrider.AsyncClient(server.address) as client:
        with pytest.raises(outrider.OutriderError, match="internal error"):
            await client.generate("fox", request_id="mine", traceparent=TRACE)
    await server.stop(0)
    (line,) = failures(lines)
    assert (line["request_id"], line["trace"]) == ("mine", TRACE[3:35])
