"""What a request is called, and its trace: told to its user, and the same in every component and in every log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from typing_extensions import override

import outrider
from outrider import AsyncClient, Client
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from services.access.key_records import hash_key
from services.api.config import PublicServerConfig
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.grpc_verifier import GrpcVerifierLink, serve_verifier
from services.links.in_process import InProcessDraftLink, InProcessVerifierLink
from services.links.request_names import traceparent_of
from speculation.messages import Draft, DraftFailure, OpenSession
from speculation.ports import DraftLink, VerifierPort
from tests.contract.test_verifier_links import Toy
from tests.engine.fakes import RandomDrafter, ToyTarget, decoding, request
from tests.running.patience import until
from tests.running.refusals import refuses
from tests.servers.service import served

OPTIONS = {"max_tokens": 12, "ignore_eos": True}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_an_answer_says_what_its_request_is_called(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        drawn = [(await client.generate("fox", **OPTIONS)).request_id for _ in range(2)]
        assert all(re.fullmatch("[0-9a-f]{32}", name) for name in drawn)
        assert drawn[0] != drawn[1]
        name = "my request/42 ~" + "x" * 113
        assert len(name) == 128
        assert (await client.generate("fox", request_id=name, **OPTIONS)).request_id == name

        def blocking() -> outrider.Generation:
            with Client(address) as plain:
                return plain.generate("fox", request_id=name, **OPTIONS)

        assert (await asyncio.to_thread(blocking)).request_id == name

        def bare(given: tuple[tuple[str, str], ...]) -> tuple[str, str]:
            with grpc.insecure_channel(address) as channel:
                call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                    pb.GenerateRequest(prompt="fox"), metadata=given
                )
                # Before the first token, so that whoever gives up early can name it.
                return dict(call.initial_metadata())["x-request-id"], [event.complete.request_id for event in call][-1]

        told, at_the_end = await asyncio.to_thread(bare, ())
        assert re.fullmatch("[0-9a-f]{32}", told)
        assert told == at_the_end
        assert await asyncio.to_thread(bare, (("x-request-id", name),)) == (name, name)


async def test_users_may_call_their_requests_the_same(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        alone = await client.generate("the quick", max_tokens=60, ignore_eos=True)
        together = await asyncio.gather(
            *(client.generate("the quick", request_id="a", max_tokens=60, ignore_eos=True) for _ in range(5))
        )
        assert [each.token_ids for each in together] == [alone.token_ids] * 5
        assert {each.request_id for each in together} == {"a"}


async def test_errors_say_it_too(tiny_model: Path) -> None:
    config = PublicServerConfig(port=0, api_key_hashes=(hash_key("k" * 20),))
    async with served(tiny_model, config=config) as (address, _), AsyncClient(address, api_key="k" * 20) as client:
        with pytest.raises(outrider.InvalidArgument) as refused:
            await client.generate("fox", temperature=-1.0, request_id="mine")
        assert refused.value.request_id == "mine"
        with pytest.raises(outrider.NotFound) as missing:
            await client.generate("fox", model="another")
        assert re.fullmatch("[0-9a-f]{32}", missing.value.request_id)

        def blocking() -> None:
            with Client(address, api_key="k" * 20) as plain:
                plain.generate("fox", max_tokens=500, timeout_s=0.05, request_id="late")

        with pytest.raises(outrider.DeadlineExceeded) as late:
            await asyncio.to_thread(blocking)
        assert late.value.request_id == "late"
    async with AsyncClient("127.0.0.1:1", retry=outrider.Retry(attempts=1)) as nowhere:
        with pytest.raises(outrider.Unavailable) as nobody:
            await nowhere.generate("fox", request_id="mine")
        assert nobody.value.request_id == "mine"
        with pytest.raises(outrider.Unavailable) as nobody:
            await nowhere.generate("fox")
        assert nobody.value.request_id == ""


async def test_a_client_that_is_late_hears_it_too(tiny_model: Path) -> None:
    """gRPC's asyncio client drops the first metadata of a call if its event loop reads the call's end before them."""

    def late() -> str:
        async def fails() -> str:
            asyncio.get_running_loop().call_soon(hold_up)
            async with AsyncClient(address) as client:
                with pytest.raises(outrider.NotFound) as missing:
                    await client.generate("fox", model="another")
            return missing.value.request_id

        def hold_up() -> None:
            time.sleep(0.01)
            asyncio.get_running_loop().call_soon(hold_up)

        return asyncio.run(fails())

    async with served(tiny_model) as (address, _):
        for _ in range(3):
            assert re.fullmatch("[0-9a-f]{32}", await asyncio.to_thread(late))


async def test_what_is_no_id_is_refused(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        for wrong in ("", "x" * 129, "schön", "a\nb", 7):
            with refuses(
                outrider.InvalidArgument, field="request_id", allowed="1 to 128 printable ASCII characters"
            ) as caught:
                await client.generate("fox", request_id=wrong)  # type: ignore[arg-type]
            assert caught.value.field == "request_id"
        with refuses(
            outrider.InvalidArgument,
            field="traceparent",
            value="'a\\nb'",
            allowed="printable ASCII characters, as in W3C Trace Context",
        ):
            await client.generate("fox", traceparent="a\nb")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for given in ([""], ["x" * 129], ["one", "two"]):
                call = stub.Generate(pb.GenerateRequest(prompt="x"), metadata=[("x-request-id", name) for name in given])
                with pytest.raises(grpc.aio.AioRpcError, match="1 to 128 printable ASCII") as failed:
                    async for _ in call:
                        pass
                assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_trace_that_cannot_be_read_is_none() -> None:
    later = "cc" + TRACE[2:] + "-what-comes-later"
    for good in (TRACE, later):
        assert traceparent_of([("other", "x"), ("traceparent", good)]) == good
    zeros = "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01"
    for bad in ("", "x", TRACE.upper(), "ff" + TRACE[2:], TRACE + "x", *zeros):
        assert traceparent_of([("traceparent", bad)]) == ""
    assert traceparent_of([("traceparent", TRACE)] * 2) == traceparent_of(None) == ""


async def test_every_component_logs_it(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        await client.generate("fox fox fox", request_id="mine", traceparent=TRACE, strategy="blend", **OPTIONS)
    for component in ("router", "verifier", "drafter"):
        lines = [entry.getMessage() for entry in caplog.records if entry.name.startswith(f"services.{component}")]
        assert any("mine" in line and TRACE in line for line in lines), component


class Noting(RandomDrafter):
    """Notes how sessions are opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[OpenSession] = []

    @override
    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        self.opened.append(message)
        return await super().open(message)


@asynccontextmanager
async def in_process(drafter: Noting) -> AsyncIterator[tuple[DraftLink, Callable[[Toy], object]]]:
    @asynccontextmanager
    async def verifying(toy: Toy) -> AsyncIterator[VerifierPort]:
        yield InProcessVerifierLink(toy)

    yield InProcessDraftLink(drafter), verifying


@asynccontextmanager
async def over_grpc(drafter: Noting) -> AsyncIterator[tuple[DraftLink, Callable[[Toy], object]]]:
    server, port = await serve_drafter(drafter, "127.0.0.1:0")

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    @asynccontextmanager
    async def verifying(toy: Toy) -> AsyncIterator[VerifierPort]:
        verifier, port = await serve_verifier(toy, "127.0.0.1:0")
        link = GrpcVerifierLink(f"127.0.0.1:{port}")
        yield link
        await link.close()
        await verifier.stop(None)

    yield GrpcDraftLink(resolve), verifying
    await server.stop(None)


@pytest.mark.parametrize("links", [in_process, over_grpc])
@pytest.mark.parametrize("tenant", [None, "", "t"])
async def test_verifier_and_drafter_are_told(links: Callable[..., object], tenant: str | None) -> None:
    drafter = Noting()
    async with links(drafter) as (link, verifying), decoding(ToyTarget(), link) as loop, verifying(Toy(loop)) as verifier:  # type: ignore[attr-defined]
        await until(lambda: link.connected)
        wanted = request("mine.1", [1, 2], max_tokens=8, ignore_eos=True)
        wanted = replace(wanted, tenant=tenant, traceparent=TRACE)
        async for _ in verifier.generate(wanted):
            pass
    (opened,) = drafter.opened
    assert "mine.1" in opened.session_id
    assert (opened.traceparent, opened.tenant) == (TRACE, tenant)
