"""The ways from a router to a verifier without Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import trustme

from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.links.grpc_verifier import GrpcVerifierLink, serve_verifier
from services.links.in_process import InProcessVerifierLink
from services.links.tls.mutual import CallerTls
from speculation.ports import VerifierPort
from tests.servers.component_certificates import write_certificates


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


@asynccontextmanager
async def outside(verifier: VerifierPort) -> AsyncIterator[VerifierPort]:
    """As ``router.verifiers`` has it: mutual TLS and a token."""
    authority = trustme.CA()
    with TemporaryDirectory() as folder:
        own, caller = (write_certificates(Path(folder), authority, role) for role in ("verifier", "router"))
        token = "a token of sixteen"
        server, port = await serve_verifier(verifier, "127.0.0.1:0", token, replace(own, serves=True))
        link = GrpcVerifierLink(f"127.0.0.1:{port}", token, CallerTls(caller, "verifier"))
        yield ChosenVerifier([link])
        await link.close()
        await server.stop(None)
