"""A model that drafts for sixteen requests at once, from hidden states of three layers, beside a second drafter: delayed,
stuck, raising or gone, over both links. No token ever changes, and what comes late is used as far as it still fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.interfaces import DraftWanted
from services.drafter.service import DrafterService
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.in_process import InProcessDraftLink
from services.verifier.engine.loop import DecodingLoop
from speculation.ports import DraftLink
from speculation.types import Plan, TokenTree
from tests.fakes import PLAIN, RandomDrafter, ToyTarget, collect, decoding, origin, request, right_tree
from tests.model_source import LAYERS, NAME, ModelDouble, register

REQUESTS, TOKENS = 16, 60
PLAN = Plan(strategy="test", sources=(NAME, "far"), max_nodes=6, observe_layers=LAYERS, observe_prompt=True)


class Right(ModelDouble):
    """Knows what the toy model says greedily."""

    def _draft(self, wanted: DraftWanted) -> TokenTree:
        super()._draft(wanted)
        return right_tree(wanted.session.tokens, wanted.max_nodes, NAME)


Chaos = Callable[[Right, DraftLink], Awaitable[None]]


async def left_alone(double: Right, link: DraftLink) -> None:
    """As fast as it is."""


async def delayed(double: Right, link: DraftLink) -> None:
    """Always slower than a step."""
    double.delay_s = 0.05


async def stuck(double: Right, link: DraftLink) -> None:
    """In the middle of a batch, for a while."""
    double.stuck.set()
    await asyncio.sleep(0.3)
    double.stuck.clear()


async def raising(double: Right, link: DraftLink) -> None:
    """For one request and then for all."""
    double.fails_for = {double.opened[0]}
    await asyncio.sleep(0.1)
    double.fails_for = {""}


async def gone(double: Right, link: DraftLink) -> None:
    """For good."""
    await link.stop()


@asynccontextmanager
async def linked(kind: str) -> AsyncIterator[DraftLink]:
    service = DrafterService(DrafterConfig())
    if kind == "in_process":
        yield InProcessDraftLink(service)
        return
    server, port = await serve_drafter(service, "127.0.0.1:0")

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    yield GrpcDraftLink(resolve)
    await server.stop(None)


async def answers(loop: DecodingLoop, plan: Plan) -> list[list[int]]:
    samplings: list[dict[str, object]] = [{}, {}, {}, {"temperature": 0.9, "seed": 5}]
    wanted = [
        request(f"r{number}", [1, 2, number], plan, max_tokens=TOKENS, ignore_eos=True, **samplings[number % 4])
        for number in range(REQUESTS)
    ]
    return [tokens for tokens, _, _ in await asyncio.gather(*(collect(loop, one) for one in wanted))]


@pytest.mark.parametrize("kind", ["in_process", "grpc"])
@pytest.mark.parametrize("chaos", [left_alone, delayed, stuck, raising, gone], ids=lambda chaos: chaos.__name__)
async def test_no_token_changes(monkeypatch: pytest.MonkeyPatch, kind: str, chaos: Chaos) -> None:
    double = register(monkeypatch, Right())
    assert isinstance(double, Right)
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as alone:
        expected = await answers(alone, PLAIN)
    target = ToyTarget()
    # A draft that takes two steps still holds tokens for the third.
    target.delay_s = 0.02 if chaos is delayed else 0.003
    async with linked(kind) as link:
        far = InProcessDraftLink(RandomDrafter(mood="random"))
        origins = [origin(link, "model", sources=[NAME]), origin(far, "far", sources=["far"])]
        async with decoding(target, *origins, draft_deadline_s=0.02) as loop:
            async with asyncio.timeout(20):
                while not link.connected:
                    await asyncio.sleep(0.01)
            if chaos is delayed:
                await chaos(double, link)
            decoding_now = asyncio.create_task(answers(loop, PLAN))
            async with asyncio.timeout(20):
                while len(double.opened) < REQUESTS:
                    await asyncio.sleep(0.002)
            if chaos is not delayed:
                await chaos(double, link)
            assert await decoding_now == expected
            assert max(len(batch) for batch in double.batches) > 1
            if chaos in (left_alone, delayed):
                assert loop.stats.nodes_by_source[NAME] > REQUESTS
                assert set(map(len, double.masked.values())) == {0}
