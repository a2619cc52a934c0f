"""A verifier and a drafter of different versions draft together: newer forms go only to peers that have named them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.internal.v1 import drafting_pb2
from services.access.refused_components import RefusedComponents
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.draft_forms import READ_HERE
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.internal import serve_internal
from tests.contract.test_draft_links import Recorder, opening, report
from tests.running.patience import PATIENCE_S, until

_METHOD = "/outrider.internal.v1.DraftingService/Draft"
# As a verifier and a drafter sent them before there were columns: a session of the tokens 5, 6, 7, 5, 6, which is opened;
# its step of 7 and 5; a draft of 7 and 5.
_OPEN = bytes.fromhex("0a1f0a0173120505060705061805220d70726f6d70745f6c6f6f6b757028044200")
_STEP = bytes.fromhex("12170a017312020705180721e0fec12dd3d6b4bb2a01003004")
_DRAFT = bytes.fromhex("0a2b0a017310051961c7f52d422f7d022a1b0a020705120201001a020000220d70726f6d70745f6c6f6f6b7570")
_TEXT = (5, 6, 7, 5, 6)


@pytest.mark.parametrize(("metadata", "form"), [((), "draft"), (READ_HERE, "drafts")])
async def test_an_older_verifier_gets_drafts_in_its_own_form(metadata: Any, form: str) -> None:
    server, port = await serve_drafter(DrafterService(DrafterConfig()), "127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE_S):
            # As bytes, both ways.
            call: Any = channel.stream_stream(_METHOD)(metadata=metadata)
            for asked in (_OPEN, _STEP):
                await call.write(asked)
                reply = drafting_pb2.DraftResponse.FromString(await call.read())
                assert reply.WhichOneof("event") == form
    finally:
        await server.stop(None)


@pytest.mark.parametrize(("metadata", "form"), [((), "step"), (READ_HERE, "steps")])
async def test_an_older_drafter_gets_reports_in_its_own_form(metadata: Any, form: str) -> None:
    came: list[str | None] = []

    async def answer(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(metadata)
        async for data in requests:
            came.append(drafting_pb2.DraftRequest.FromString(data).WhichOneof("event"))
            yield _DRAFT

    def add(server: grpc.aio.Server) -> None:
        methods: dict[str, Any] = {"Draft": grpc.stream_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METHOD.split("/")[1], methods),))

    server, port = await serve_internal(add, "127.0.0.1:0", None, None, RefusedComponents("drafter"))
    link, recorder = GrpcDraftLink(lambda: _given(f"127.0.0.1:{port}"), elsewhere=True), Recorder()
    await link.start(recorder)
    try:
        await until(recorder.connected.is_set)
        link.open(opening("s", _TEXT))
        async with asyncio.timeout(PATIENCE_S):
            await recorder.replies.get()
            link.step(report("s", _TEXT, (7, 5)))
            await recorder.replies.get()
    finally:
        await link.stop()
        await server.stop(None)
    assert came == ["open", form]


async def _given(address: str) -> str:
    return address
