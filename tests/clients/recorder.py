"""Stands between a client and a server: passes on what both say, and keeps what was asked for.

The first part of a path names the feature for which the client asks.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.running.ports import free_port

_SEED = re.compile(rb'"seed": ?(\d+)')
_METHODS = ["GET", "POST", "DELETE"]
_NOT_PASSED_ON = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


@dataclass(frozen=True)
class Asked:
    """A request to generate.

    Attributes:
        status: of its answer.
        refusal: the answer, if it is an error.
        answered: it, as far as it has come.
    """

    path: str
    body: dict[str, Any]
    status: int
    refusal: str
    answered: bytearray

    @property
    def seed(self) -> int | None:
        """With which the answer was sampled, where it says so."""
        found = _SEED.search(self.answered)
        return None if found is None else int(found[1])


class Recorder:
    """Attributes:
    url: where clients ask.
    asked: by feature.
    """

    def __init__(self, server: str) -> None:
        self.asked: dict[str, list[Asked]] = defaultdict(list)
        self._server = server
        self._client = httpx2.AsyncClient(timeout=300, trust_env=False)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        app = Starlette(routes=[Route("/{feature}/{path:path}", self._pass_on, methods=_METHODS)])
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(10)

    async def _pass_on(self, request: Request) -> StreamingResponse:
        path, body = "/" + request.path_params["path"], await request.body()
        answered = bytearray()
        headers = [(name, value.strip()) for name, value in request.headers.items() if name not in _NOT_PASSED_ON]
        url = self._server + path + (f"?{request.url.query}" if request.url.query else "")
        sent = self._client.build_request(request.method, url, content=body, headers=headers)
        answer = await self._client.send(sent, stream=True)
        if answer.status_code >= 400:
            await answer.aread()
        if request.method == "POST" and path.startswith(("/v1/", "/api/chat")) and not path.endswith("/count_tokens"):
            refusal = answer.text if answer.status_code >= 400 else ""
            asked = Asked(path, json.loads(body), answer.status_code, refusal, answered)
            self.asked[request.path_params["feature"]].append(asked)

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                answered.extend(piece)
                yield piece
            await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_PASSED_ON}
        content = pieces() if answer.status_code < 400 else iter([answer.content])
        return StreamingResponse(content, answer.status_code, kept)


@contextmanager
def recording(server: str) -> Iterator[Recorder]:
    recorder = Recorder(server)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
