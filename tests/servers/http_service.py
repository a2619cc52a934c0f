"""A whole service behind both public servers, in a thread of its own, for clients that block and for several tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.build import Pipeline
from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc.server import serve_public
from services.api.http.server import HttpServer, serve_http
from tests.running.patience import end_thread
from tests.servers.service import pipeline


@dataclass(frozen=True, kw_only=True)
class HttpService:
    url: str
    grpc: str
    pipeline: Pipeline
    http: HttpServer
    loop: asyncio.AbstractEventLoop

    def run(self, work: Any) -> Any:
        """The result of a coroutine that runs in the service's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@contextmanager
def http_served(folder: Path, *flags: str, config: HttpConfig | None = None) -> Iterator[HttpService]:
    ready: Future[tuple[HttpService, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            async with pipeline(folder, *flags) as running:
                http = await serve_http(running.router, config or HttpConfig(port=0))
                grpc = await serve_public(running.router, PublicServerConfig(port=0))
                service = HttpService(
                    url=http.url, grpc=grpc.address, pipeline=running, http=http, loop=asyncio.get_running_loop()
                )
                ready.set_result((service, stop))
                await stop.wait()
                await http.stop(0)
                await grpc.stop(0)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    service, stop = ready.result(60)
    try:
        yield service
    finally:
        end_thread(thread, service.loop, stop)
