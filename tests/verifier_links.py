"""Both ways from a router to a verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.links.grpc_verifier import GrpcVerifierLink, serve_verifier
from services.links.in_process import InProcessVerifierLink
from speculation.ports import VerifierPort


@asynccontextmanager
async def in_process(verifier: VerifierPort) -> AsyncIterator[VerifierPort]:
    yield InProcessVerifierLink(verifier)


@asynccontextmanager
async def over_grpc(verifier: VerifierPort) -> AsyncIterator[VerifierPort]:
    server, port = await serve_verifier(verifier, "127.0.0.1:0")
    link = GrpcVerifierLink(f"127.0.0.1:{port}")
    yield link
    await link.close()
    await server.stop(None)
