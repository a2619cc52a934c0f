"""Every server of the service, public and internal, in one process, for those who send them what is malformed.

``python -m tests.servers.malformed_service MODEL [SETTING=VALUE ...]`` serves until its input ends, and says where as one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc.server import serve_public
from services.api.http.server import serve_http
from services.links.grpc_draft import serve_drafter
from services.links.grpc_retrieval import serve_retrieval
from services.links.grpc_verifier import serve_verifier
from speculation.held_models import DrafterCard
from speculation.messages import RetrievalQuery, Retrieved
from tests.running.patience import until
from tests.servers.service import pipeline


class NothingFound:
    """Implements ``LooksUp``: no index holds anything."""

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        return [Retrieved() for _ in queries]


@asynccontextmanager
async def all_servers(model: Path, *flags: str) -> AsyncIterator[dict[str, str]]:
    """The "host:port" of each server by its name: public, http, verifier, drafter, retrieval."""
    async with pipeline(model, *flags) as running:
        public = await serve_public(running.router, PublicServerConfig(port=0))
        http = await serve_http(running.router, HttpConfig(port=0))
        verifier, verifier_port = await serve_verifier(running.verifier, "127.0.0.1:0")
        drafter, drafter_port = await serve_drafter(running.drafter, "127.0.0.1:0", card=DrafterCard())
        retrieval, retrieval_port = await serve_retrieval(NothingFound(), "127.0.0.1:0")
        ports = {"verifier": verifier_port, "drafter": drafter_port, "retrieval": retrieval_port}
        yield {"public": public.address, "http": http.address} | {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        await http.stop(0)
        for server in (public, verifier, drafter, retrieval):
            await server.stop(0)
        # What was cut off ends in the loop's next step, and the drafter hears of it then.
        loop, drafter = running.verifier.loop, running.drafter
        await until(lambda: not (loop.running or loop.waiting or drafter.sessions))
        card = await running.verifier.describe()
        assert (card.running, card.waiting, card.free_blocks) == (0, 0, card.total_blocks), card


async def _serve(model: Path, *flags: str) -> None:
    async with all_servers(model, *flags) as addresses:
        # As the service's own entry does.
        gc.collect()
        gc.freeze()
        print(json.dumps(addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_serve(Path(sys.argv[1]), *sys.argv[2:]))
