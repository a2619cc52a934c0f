"""A drafter outside of the service tells what it holds: its models are then named, listed and ruled by like the service's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.build import Pipeline, in_process
from cluster.models.target import ResolvedModel
from cluster.outside import drafter
from cluster.settings.config import Settings, load
from outrider.internal.v1 import drafting_pb2, drafting_pb2_grpc
from services.api.messages import ClientRequest, Completion, RequestedSampling, TextChunk
from services.links.codec.held_models import encode_drafter
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.verifier.engine.registered_models import RegisteredModels
from speculation.errors import InvalidArgument, OutriderError
from speculation.held_models import DrafterCard, HeldModel
from tests.contract.test_draft_links import Recorder
from tests.engine.fakes import RandomDrafter
from tests.running.patience import PATIENCE_S, until
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.service import tiny_settings
from tests.tiny_models.trained_heads import make_head

TOKEN = "a token of sixteen"
PROMPT = tuple([1, 2, 3, 4, 5, 6, 7, 8] * 4)
TWIN, LAW = "draft_model@twin", "fspad@law"
RULE = {"name": "batch", "when": {"tenant": "batch"}, "set": {"drafter": "twin", "strategy": "draft_model"}}


class Outside:
    """A service with a drafter at an address, and drafters that come there."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.model, self.port, self._folder = ResolvedModel(name="tiny", path=target), free_port(), folder
        (folder / "token").write_text(TOKEN)

    def settings(self, *flags: str) -> Settings:
        return load(flags=tiny_settings(f"internal_token_file={self._folder / 'token'}", *flags), environ={})

    @asynccontextmanager
    async def service(self, *flags: str) -> AsyncIterator[Pipeline]:
        named = (f"drafter.address=127.0.0.1:{self.port}", "drafter.trusted=false", "verifier.draft_deadline_s=10", *flags)
        async with in_process(self.settings(*named), self.model) as running:
            yield running

    @asynccontextmanager
    async def drafting(self, *models: object) -> AsyncIterator[None]:
        named = (f"drafter.port={self.port}", f"drafter.models={json.dumps(models)}")
        async with drafter.drafting(self.settings(*named), self.model):
            yield

    @property
    def twin(self) -> dict[str, Any]:
        """The target itself as a draft model."""
        return {"folder": str(self.model.path), "name": "twin"}

    @property
    def law(self) -> dict[str, Any]:
        """A head of one tenant."""
        return {**self.head, "tenants": ["firm"]}

    @property
    def head(self) -> dict[str, Any]:
        return {"folder": str(make_head(self.model.path, self._folder / "law", "fspad")), "name": "law"}


@pytest.fixture
def outside(tiny_model: Path, tmp_path: Path) -> Outside:
    return Outside(tiny_model, tmp_path)


async def ask(running: Pipeline, tenant: str = "one", **asked: Any) -> tuple[list[int], Completion]:
    """An answer's tokens, and its end."""
    sampling = RequestedSampling(max_tokens=12, ignore_eos=True)
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in running.router.generate(ClientRequest(input=PROMPT, sampling=sampling, tenant=tenant, **asked)):
            if isinstance(event, TextChunk):
                tokens += event.token_ids
            else:
                end = event
    return tokens, end


async def drafters(running: Pipeline, tenant: str = "one") -> list[str]:
    (card,) = await running.router.models(tenant)
    return [each.name for each in card.drafters]


async def told(running: Pipeline, held: tuple[str, ...] | None) -> None:
    """Wait until the service knows that these are held."""

    async def seen() -> bool:
        card = await running.verifier.describe()
        return (None if card.held is None else tuple(each.called for each in card.held)) == held

    async with asyncio.timeout(PATIENCE_S):
        while not await seen():
            await asyncio.sleep(0.02)
    # Which the router is told with the next look at it.
    assert await running.router.ready()


async def test_its_models_are_named_while_it_holds_them(outside: Outside) -> None:
    rules = f"router.rules={json.dumps([RULE])}"
    async with outside.service("drafter.models=[]", rules) as running:
        plain, _ = await ask(running, strategy="autoregressive")
        with refuses(InvalidArgument, field="speculation.drafter", value="twin", allowed="unset: no model drafts here"):
            await ask(running, drafter="twin")
        assert (await ask(running, "batch"))[1].rule == ""
        async with outside.drafting(outside.twin, outside.law):
            await told(running, ("twin", "law"))
            tokens, end = await ask(running, drafter="twin", strategy="draft_model")
            assert tokens == plain and set(end.stats.accepted_by_source) == {TWIN}
            tokens, end = await ask(running, "batch")
            assert (tokens, end.rule, set(end.stats.accepted_by_source)) == (plain, "batch", {TWIN})
            for asked in ({}, {"effort": "paper"}, {"sources": (TWIN, "suffix")}):
                assert (await ask(running, **asked))[0] == plain
            # Another tenant's is refused like one that nobody holds.
            assert (await drafters(running), await drafters(running, "firm")) == (["twin"], ["twin", "law"])
            for name in ("law", "lore"):
                with refuses(InvalidArgument, field="speculation.drafter", value=name, allowed="one of twin"):
                    await ask(running, drafter=name)
            tokens, end = await ask(running, "firm", drafter="law", strategy="fspad")
            assert tokens == plain and set(end.stats.accepted_by_source) <= {LAW}
        async with outside.drafting(outside.head):
            await told(running, ("law",))
            assert await drafters(running) == ["law"]
            with refuses(InvalidArgument, field="speculation.drafter", value="twin", allowed="one of law"):
                await ask(running, drafter="twin")
            assert (await ask(running, drafter="law"))[0] == plain
            assert (await ask(running, "batch"))[1].rule == ""


async def test_what_the_service_says_of_them_counts_as_well(outside: Outside) -> None:
    mine = json.dumps([{**outside.twin, "tenants": ["acme"]}, outside.head])
    async with outside.service(f"drafter.models={mine}") as running, outside.drafting(outside.twin, outside.law):
        await told(running, ("twin", "law"))
        assert [await drafters(running, each) for each in ("one", "acme", "firm")] == [[], ["twin"], ["law"]]
    # One of its models is called like one beside the target.
    beside = (f"drafter.models={json.dumps([outside.twin])}", "drafter.models_in=verifier")
    namesake = {**outside.head, "name": "twin"}
    async with outside.service(*beside) as running, outside.drafting(namesake, outside.head):
        await told(running, ("twin", "law"))
        plain, _ = await ask(running, strategy="autoregressive")
        for name, strategy, source in (("twin", "draft_model", TWIN), ("law", "fspad", LAW)):
            tokens, end = await ask(running, drafter=name, strategy=strategy)
            assert tokens == plain and set(end.stats.accepted_by_source) <= {source}


@pytest.mark.parametrize("planted", [False, True], ids=["checked", "unchecked"])
async def test_what_it_tells_wrongly_fails_no_request(
    outside: Outside, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as layers that the target does not have: a request that was planned with them would be refused."""
    card = DrafterCard(held=(HeldModel(kind="fspad", name="code", layers=(99,)), HeldModel(kind="medusa", when="{")))
    if planted:
        monkeypatch.setattr(RegisteredModels, "_check", lambda *_: None)
    server, _ = await serve_drafter(RandomDrafter(mood="good"), f"127.0.0.1:{outside.port}", TOKEN, card=card)
    try:
        async with outside.service("drafter.models=[]") as running:
            await told(running, ("code", "medusa") if planted else ("medusa",))
            assert await drafters(running) == (["code"] if planted else [])
            plain, _ = await ask(running, strategy="autoregressive")
            if planted:
                with pytest.raises(OutriderError, match="observe_layers"):
                    await ask(running)
            else:
                assert (await ask(running))[0] == plain
    finally:
        await server.stop(None)


@asynccontextmanager
async def linked(card: DrafterCard | None, token: str = TOKEN) -> AsyncIterator[tuple[GrpcDraftLink, Recorder]]:
    server, port = await serve_drafter(RandomDrafter(mood="good"), "127.0.0.1:0", TOKEN, card=card)

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link, recorder = GrpcDraftLink(resolve, token, elsewhere=True), Recorder()
    await link.start(recorder)
    try:
        yield link, recorder
    finally:
        await link.stop()
        await server.stop(None)


def _twice(answer: Any) -> None:
    answer.held.models.add(kind="fspad", name="code")


def _nothing(answer: Any) -> None:
    pass


@pytest.mark.parametrize(("change", "kept"), [(_nothing, True), (_twice, False)], ids=["right", "a name twice"])
async def test_the_link_asks_at_each_connection(
    change: Callable[[Any], None], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = DrafterCard(held=(HeldModel(kind="fspad", name="code", layers=(-1,), tenants=("a",)),), version="1")

    def changed(given: DrafterCard) -> drafting_pb2.DraftingServiceDescribeResponse:
        change(answer := encode_drafter(given))
        return answer

    monkeypatch.setattr("services.links.grpc_draft.encode_drafter", changed)
    async with linked(card) as (link, recorder):
        for _ in range(2):
            await until(recorder.connected.is_set)
            assert link.connected and link.card == (card if kept else None)
            recorder.connected.clear()
            link.card = None
            link.reconnect()


async def test_an_older_drafter_goes_on_and_a_stranger_is_told_nothing() -> None:
    async with linked(None) as (link, recorder):
        await until(recorder.connected.is_set)
        assert link.connected and link.card is None
    card = DrafterCard(held=(HeldModel(kind="fspad"),))
    server, port = await serve_drafter(RandomDrafter(mood="good"), "127.0.0.1:0", TOKEN, card=card)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            asked = drafting_pb2.DraftingServiceDescribeRequest()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await drafting_pb2_grpc.DraftingServiceStub(channel).Describe(asked)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await server.stop(None)
