"""A model that drafts for sixteen requests at once, from hidden states of three layers, beside a second drafter: delayed,
stuck, raising or gone, over both links. No token ever changes, and what comes late is used as far as it still fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.session import FeatureSession
from services.drafter.service import DrafterService
from services.drafter.sources.interfaces import DraftWanted
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.in_process import InProcessDraftLink
from services.verifier.engine.loop import DecodingLoop
from speculation.messages import OpenSession, StepReport
from speculation.ports import DraftLink
from speculation.types import Plan, TokenTree
from tests.drafters.feature_sources import EAGLE3, head
from tests.drafters.model_source import LAYERS, NAME, ModelDouble, register
from tests.engine.fakes import PLAIN, VOCAB, RandomDrafter, ToyTarget, collect, decoding, origin, request, right_tree
from tests.running.patience import PATIENCE_S, until

REQUESTS, TOKENS = 16, 60
PLAN = Plan(strategy="test", sources=(NAME, "far"), max_nodes=6, observe_layers=LAYERS, observe_prompt=True)


class Right(ModelDouble):
    """Knows what the toy model says greedily."""

    @override
    def _draft(self, wanted: DraftWanted) -> TokenTree:
        super()._draft(wanted)
        return right_tree(wanted.session.tokens, wanted.max_nodes, NAME)


class Headed(Right):
    """A drafter of hidden states behind the same faults; the toy's states are two numbers wide."""

    def __init__(self) -> None:
        super().__init__()
        config = replace(
            EAGLE3, state_layers=LAYERS, target_hidden_size=2, own_embedding=True, vocab_size=VOCAB, draft_vocab_size=VOCAB
        )
        self.source = FeatureSource(NAME, head(config), window=64)
        self.inner: dict[str, FeatureSession] = {}

    @override
    def open(self, message: OpenSession) -> Any:
        session, inner = super().open(message), self.source.open(message)
        self.inner[session.id] = inner
        observe = session.observe

        def observe_both(report: StepReport) -> None:
            observe(report)
            inner.observe(report)

        session.observe = observe_both  # type: ignore[method-assign]
        return session

    @override
    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree]:
        super().draft(batch)
        return self.source.draft([replace(wanted, session=self.inner[wanted.session.id]) for wanted in batch])


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


@pytest.mark.examples(24)
@pytest.mark.parametrize("kind", ["in_process", "grpc"])
@pytest.mark.parametrize("model", [Headed, Right])
@pytest.mark.parametrize("chaos", [left_alone, delayed, stuck, raising, gone], ids=lambda chaos: chaos.__name__)
async def test_no_token_changes(monkeypatch: pytest.MonkeyPatch, model: type[Right], kind: str, chaos: Chaos) -> None:
    double = register(monkeypatch, model())
    assert isinstance(double, Right)
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as alone:
        expected = await answers(alone, PLAIN)
    target = ToyTarget()
    # A draft that takes a step or two, or twice that behind another batch, still holds tokens for the next.
    target.delay_s = 0.04 if chaos is delayed else 0.003
    async with linked(kind) as link:
        far = InProcessDraftLink(RandomDrafter(mood="random"))
        origins = [origin(link, "model", sources=[NAME]), origin(far, "far", sources=["far"])]
        async with decoding(target, *origins, draft_deadline_s=0.02) as loop:
            await until(lambda: link.connected)
            if chaos is delayed:
                await chaos(double, link)
            decoding_now = asyncio.create_task(answers(loop, PLAN))
            await until(lambda: len(double.opened) >= REQUESTS)
            if chaos is not delayed:
                await chaos(double, link)
            assert await decoding_now == expected
            async with asyncio.timeout(PATIENCE_S):
                while chaos is not gone and max(len(batch) for batch in double.batches) <= 1:
                    assert await answers(loop, PLAN) == expected
            if chaos in (left_alone, delayed):
                # An untrained head is slower than the toy, and what comes late must be right to be used.
                async with asyncio.timeout(PATIENCE_S):
                    while model is Right and loop.stats.nodes_by_source.get(NAME, 0) <= REQUESTS:
                        assert await answers(loop, PLAN) == expected
                assert not loop.stats.drafts_malformed
                # The draft that is made when a session opens may be its only one, and comes before the prompt's states.
                later = [missing for session, missing in double.masked.items() if double.drafts[session] > 1]
                assert later or model is Headed
                assert not any(later)
