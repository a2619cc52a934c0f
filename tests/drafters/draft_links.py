"""A drafter over each link to it, by the link's name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.in_process import InProcessDraftLink
from speculation.ports import Drafter, DraftLink


@asynccontextmanager
async def linked(drafter: Drafter, link: str) -> AsyncIterator[DraftLink]:
    """A link to ``drafter``: ``in_process``, or ``grpc`` to a server of its own."""
    if link == "in_process":
        yield InProcessDraftLink(drafter)
        return
    server, port = await serve_drafter(drafter, "127.0.0.1:0")

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    try:
        yield GrpcDraftLink(resolve)
    finally:
        await server.stop(None)
