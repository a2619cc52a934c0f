"""One suite over the ways from router to verifier; what each case observes is compared for equality."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from outrider.requests import join
from services.api.grpc.messages import encode_event
from services.api.http.openai.usage import metrics
from services.links.grpc_verifier import GrpcVerifierLink, serve_verifier
from services.links.in_process import InProcessDraftLink
from services.router.answer import Answer
from services.router.detokenizer import Detokenizer
from services.verifier.engine.loop import DecodingLoop
from speculation import limits
from speculation.adapters import AdapterOrder
from speculation.errors import InvalidArgument, NotBegun, OutriderError, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ServedWeights, VerifierCard
from speculation.ports import VerifierPort
from speculation.reloads import ReloadOrder
from tests.engine.fakes import VOCAB, RandomDrafter, ToyTarget, decoding, request
from tests.engine.simulated import PASS_S, SimulatedBudget
from tests.running.patience import PATIENCE_S, until
from tests.running.ports import free_port
from tests.servers.verifier_links import in_process, outside, over_grpc

Observed = list[object]


class Toy:
    """Implements ``VerifierPort`` on the toy target."""

    def __init__(self, loop: DecodingLoop) -> None:
        self.loop = loop
        self.generate = loop.generate

    async def forget(self, tenant: str) -> None:
        await self.loop.forget(tenant)

    async def adapt(self, order: AdapterOrder) -> str:
        if order.step == "close":
            raise InvalidArgument("lora_name", order.name, "an adapter that is not in use")
        return f"{order.order_id} {order.name} {order.folder}" if order.step == "load" else ""

    async def reload(self, order: ReloadOrder) -> str:
        raise NotImplementedError

    async def describe(self) -> VerifierCard:
        return VerifierCard(
            model="toy",
            max_model_len=512,
            vocab_size=VOCAB,
            running=self.loop.running,
            waiting=self.loop.waiting,
            free_blocks=1,
            total_blocks=2,
            bit_exact=True,
            weights=ServedWeights(stored="FP8 \N{SNOWMAN}", multiplied=("Q4_0", "float32"), kernels="native"),
        )


class Noting(Toy):
    """Notes what each step saved, before a link carries it."""

    def __init__(self, loop: DecodingLoop) -> None:
        super().__init__(loop)
        self.saved: list[float] = []
        self.generate = self._noted

    async def _noted(self, wanted: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        async with aclosing(self.loop.generate(wanted)) as steps:
            async for event in steps:
                if isinstance(event, Progress):
                    self.saved.append(event.saved_s)
                yield event


class Mute:
    """Of ``services.router.tokenizer_backend.Backend``, what a ``Detokenizer`` needs: no token has a text."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return ""


async def events(link: VerifierPort, wanted: GenerationRequest) -> Observed:
    seen: Observed = []
    try:
        async for event in link.generate(wanted):
            seen += _by_token(event) if isinstance(event, Progress) else [event]
    except OutriderError as error:
        seen.append((type(error), str(error), vars(error)))
    return seen


def _by_token(step: Progress) -> Observed:
    """What of a step does not depend on how many of its drafts came in time."""
    alike = replace(step, queue_s=0.0, num_drafted=0, accepted_sources=())
    logprobs = [(entry,) for entry in step.logprobs] or [()] * len(step.token_ids)
    return [
        replace(alike, token_ids=(token,), logprobs=entry) for token, entry in zip(step.token_ids, logprobs, strict=True)
    ]


async def greedy(link: VerifierPort, target: ToyTarget) -> Observed:
    return await events(link, request("r", [1, 2, 3], max_tokens=30, ignore_eos=True))


async def sampled_with_logprobs(link: VerifierPort, target: ToyTarget) -> Observed:
    wanted = request("r", [1, 2], max_tokens=20, temperature=0.9, top_p=0.9, seed=2**64 - 1, logprobs=2, logit_bias={3: 0.5})
    return await events(link, wanted)


async def described(link: VerifierPort, target: ToyTarget) -> Observed:
    return [await link.describe()]


async def forgotten(link: VerifierPort, target: ToyTarget) -> Observed:
    before = await events(link, request("r", [1, 2, 3], max_tokens=5, ignore_eos=True))
    await link.forget("tenant \N{SNOWMAN}")
    after = await events(link, request("r", [1, 2, 3], max_tokens=5, ignore_eos=True))
    assert target.forgotten == ["tenant \N{SNOWMAN}"]
    return [*before, *after]


async def adapted(link: VerifierPort, target: ToyTarget) -> Observed:
    order = AdapterOrder(order_id="o", step="load", name="lora \N{SNOWMAN}", folder="/adapters/lora")
    found: Observed = [await link.adapt(order), await link.adapt(replace(order, step="undo"))]
    try:
        await link.adapt(replace(order, step="close"))
    except OutriderError as error:
        found.append((type(error), str(error), vars(error)))
    assert found[:2] == ["o lora \N{SNOWMAN} /adapters/lora", ""] and len(found) == 3
    return found


async def prompt_too_long(link: VerifierPort, target: ToyTarget) -> Observed:
    return await events(link, request("r", [1] * 512))


async def empty_prompt(link: VerifierPort, target: ToyTarget) -> Observed:
    return await events(link, request("r", []))


async def token_outside(link: VerifierPort, target: ToyTarget) -> Observed:
    return await events(link, request("r", [VOCAB]))


async def failure_inside(link: VerifierPort, target: ToyTarget) -> Observed:
    target.fail_next = True
    first = await events(link, request("a", [1, 2]))
    return [*first, *await events(link, request("b", [1, 2], max_tokens=4))]


async def used_name(link: VerifierPort, target: ToyTarget) -> Observed:
    target.delay_s = 0.05
    first = asyncio.create_task(events(link, request("same", [1], max_tokens=400, ignore_eos=True)))
    await until(lambda: target.kept)
    second = await events(link, request("same", [1]))
    assert not first.done()
    first.cancel()
    return second


CASES = [
    greedy,
    sampled_with_logprobs,
    described,
    forgotten,
    adapted,
    prompt_too_long,
    empty_prompt,
    token_outside,
    failure_inside,
    used_name,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_all_links_behave_alike(case: Callable[[VerifierPort, ToyTarget], Awaitable[Observed]]) -> None:
    observed = []
    for connect in (in_process, over_grpc, outside):
        target = ToyTarget()
        draft_link = InProcessDraftLink(RandomDrafter(mood="good"))
        async with decoding(target, draft_link) as loop, connect(Toy(loop)) as link:
            async with asyncio.timeout(PATIENCE_S):
                observed.append(await case(link, target))
    assert observed[0]
    assert observed[0] == observed[1] == observed[2]


@pytest.mark.parametrize("connect", [in_process, over_grpc, outside], ids=["in_process", "grpc", "outside"])
async def test_leaving_frees_everything(connect: Callable[..., object]) -> None:
    target, drafter = ToyTarget(), RandomDrafter()
    target.delay_s = 0.002
    async with decoding(target, InProcessDraftLink(drafter)) as loop, connect(Toy(loop)) as link:  # type: ignore[attr-defined]
        generation = link.generate(request("r", [1], max_tokens=400, ignore_eos=True))
        await anext(generation)
        await generation.aclose()
        await until(lambda: not (target.kept or drafter.sessions or loop.running))


@pytest.mark.parametrize("connect", [in_process, over_grpc, outside], ids=["in_process", "grpc", "outside"])
async def test_what_the_steps_saved_is_what_the_answer_says(connect: Callable[..., object]) -> None:
    wanted = request("r", [1, 2, 3], max_tokens=60, ignore_eos=True)
    answer = Answer(wanted, "r", Detokenizer(Mute()), 0.0)  # type: ignore[arg-type]
    saved, end = [], None
    drafter = InProcessDraftLink(RandomDrafter(mood="good"))
    async with decoding(ToyTarget(), drafter, budget=SimulatedBudget(PASS_S)) as loop:
        verifier = Noting(loop)
        async with connect(verifier) as link:  # type: ignore[attr-defined]
            async for event in link.generate(wanted):
                if isinstance(event, Progress):
                    answer.add(event)
                    saved.append(event.saved_s)
                else:
                    end = answer.complete(event.reason, "toy")
    assert saved == verifier.saved
    assert any(saved)
    assert end is not None
    assert end.stats.seconds_saved == sum(verifier.saved)
    # As users get it, from the client and over HTTP.
    assert join([], encode_event(end).complete).speculative_decoding.seconds_saved == sum(verifier.saved)
    assert metrics([end], "none")["speculative_decoding"]["seconds_saved"] == sum(verifier.saved)


async def test_a_verifier_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIBE_S", 0.2)
    link = GrpcVerifierLink("127.0.0.1:1")
    with pytest.raises(Unavailable):
        await link.describe()
    with pytest.raises(Unavailable):
        await anext(link.generate(request("r", [1])))
    await link.close()


async def test_one_that_refuses_to_begin_has_not_failed() -> None:
    async def refuse(request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        raise NotBegun("another arithmetic")
        yield

    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop:
        verifier = Toy(loop)
        verifier.generate = refuse
        async with over_grpc(verifier) as link:
            with pytest.raises(NotBegun, match="another arithmetic"):
                await anext(link.generate(request("r", [1])))


async def test_one_that_comes_later_is_described_at_once() -> None:
    port = free_port()
    link = GrpcVerifierLink(f"127.0.0.1:{port}")
    with pytest.raises(Unavailable):
        await anext(link.generate(request("r", [1])))
    # gRPC pauses before its next try to connect, and calls that do not wait for it fail meanwhile.
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop:
        server, _ = await serve_verifier(Toy(loop), f"127.0.0.1:{port}")
        try:
            assert (await link.describe()).model == "toy"
        finally:
            await link.close()
            await server.stop(None)


async def test_exactly_one_terminal_message() -> None:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop, over_grpc(Toy(loop)) as link:
        seen = await events(link, request("r", [1], max_tokens=10))
        assert [isinstance(event, Finished) for event in seen].count(True) == 1
        assert isinstance(seen[-1], Finished)
