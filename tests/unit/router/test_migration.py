"""A verifier that dies in mid-answer: another one goes on, nothing lost, nothing twice, the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import ActorDiedError
from typing_extensions import override

from cluster.build import Pipeline
from cluster.ray.serve_link import translate
from services.api.messages import ClientRequest, Completion, RequestedSampling, TextChunk
from services.metrics.registry import DROPPED
from services.router.config import RouterConfig, RouterWaits
from services.router.migration import Migration
from services.router.service import RouterService
from services.verifier.engine.identity import Identity
from speculation.errors import NodeTaken, NotBegun, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard
from speculation.types import FinishReason
from tests.engine.fakes import request
from tests.engine.simulated import simulated
from tests.servers.service import pipeline

AT_ONCE = RouterWaits(migration_s=(0.0, 0.0, 0.0))


class Mortal:
    """Implements ``VerifierPort``: dies after so many tokens, a few times."""

    def __init__(self, inner: Pipeline, after: int, lives: int, error: type[Unavailable] = Unavailable) -> None:
        self.error = error
        self.inner = inner.verifier
        self.after = after
        self.lives = lives

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        said = 0
        events = self.inner.generate(request)
        try:
            async for event in events:
                if self.lives > 0 and said >= self.after:
                    self.lives -= 1
                    raise self.error("gone")
                if isinstance(event, Progress):
                    said += len(event.token_ids)
                yield event
        finally:
            await events.aclose()

    async def describe(self) -> VerifierCard:
        return await self.inner.describe()


async def answer(router: RouterService, strategy: str, **sampling: object) -> tuple[str, list[int], Completion]:
    request = ClientRequest(
        input="the quick brown fox",
        sampling=RequestedSampling(max_tokens=50, seed=3, ignore_eos=True, **sampling),  # type: ignore[arg-type]
        strategy=strategy,
        tenant="",
    )
    text, tokens = "", []
    async for event in router.generate(request):
        if isinstance(event, TextChunk):
            text += event.text
            tokens += event.token_ids
        else:
            completion = event
    return text, tokens, completion


@pytest.mark.examples(3)
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 20}],
    ids=str,
)
async def test_the_answer_goes_on(tiny_model: Path, strategy: str, sampling: dict[str, object]) -> None:
    async with pipeline(tiny_model) as running:
        expected = await answer(running.router, strategy, **sampling)
        # At 50 all is said, and only the terminal message is lost.
        for after in (0, 1, 7, 50):
            router = RouterService(
                RouterConfig(model_path=str(tiny_model), waits=AT_ONCE), Mortal(running, after, lives=3 if after else 1)
            )
            text, tokens, completion = await answer(router, strategy, **sampling)
            assert (text, tokens) == expected[:2]
            assert completion.completion_tokens == 50
        assert running.verifier.loop.running == 0


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    ("error", "tried"),
    [(Unavailable, 2), (NotBegun, 4), (NodeTaken, 4)],
    ids=["two verifiers may fail at it", "all may refuse to begin", "all may lose their machines"],
)
async def test_but_not_for_ever(tiny_model: Path, error: type[Unavailable], tried: int) -> None:
    async with pipeline(tiny_model) as running:
        verifier = Mortal(running, 0, lives=10, error=error)
        router = RouterService(RouterConfig(model_path=str(tiny_model), migration_timeout_s=0.0, waits=AT_ONCE), verifier)
        with pytest.raises(Unavailable):
            await answer(router, "prompt_lookup")
        assert 10 - verifier.lives == tried


async def test_a_new_call_outlives_a_lost_node_during_a_roll_out(tiny_model: Path) -> None:
    """One verifier is replaced before the first token, and the next one's machine goes: neither says anything of the call."""
    async with pipeline(tiny_model) as running:
        expected = await answer(running.router, "prompt_lookup")

        class Unlucky(Mortal):
            """Dies twice, the second time of another cause."""

            @override
            async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
                self.error = Unavailable if self.lives == 2 else NodeTaken
                async for event in super().generate(request):
                    yield event

        router = RouterService(RouterConfig(model_path=str(tiny_model), waits=AT_ONCE), Unlucky(running, 0, lives=2))
        text, tokens, _ = await answer(router, "prompt_lookup")
        assert (text, tokens) == expected[:2]


def test_a_preempted_node_is_no_sign_against_the_request() -> None:
    """What Ray says of an actor whose node ended after a SIGTERM, and of one that died by itself."""
    said = {"class_name": "VerifierDeployment", "actor_id": bytes(16), "error_message": "its node has died"}
    preempted = NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED)
    died = NodeDeathInfo(reason=NodeDeathInfo.UNEXPECTED_TERMINATION)
    for info, kind in ((preempted, NodeTaken), (died, Unavailable), (None, Unavailable)):
        cause = ActorDiedErrorContext(**said, node_death_info=info)
        assert type(translate(ActorDiedError(cause))) is kind


async def test_a_request_that_fails_at_one_token_is_tried_on_two(tiny_model: Path) -> None:
    async with pipeline(tiny_model) as running:

        class Poisoned(Mortal):
            """Dies whenever the answer has come to 9 tokens."""

            @override
            async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
                self.after = 9 - len(request.committed)
                async for event in super().generate(request):
                    yield event

        verifier = Poisoned(running, 9, lives=10)
        router = RouterService(RouterConfig(model_path=str(tiny_model), waits=AT_ONCE), verifier)
        with pytest.raises(Unavailable):
            await answer(router, "autoregressive")
        assert 10 - verifier.lives == 2


class Lone:
    """Implements ``VerifierPort``: a fleet of one, which says a token a second up to ``TOKENS``, and is away for a while.

    Args:
        dies_at, back_at: seconds of the loop's clock between which it is gone.
        full_until: it has no room before.
        poisoned: it dies again at the same token.
    """

    TOKENS = 6

    def __init__(self, dies_at: float, back_at: float, full_until: float = 0.0, *, poisoned: bool = False) -> None:
        self.dies_at, self.back_at, self.full_until, self.poisoned = dies_at, back_at, full_until, poisoned
        self.begun = 0

    @property
    def gone(self) -> bool:
        return self.dies_at <= asyncio.get_running_loop().time() < self.back_at

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        if self.gone:
            raise NotBegun("nobody there")
        if asyncio.get_running_loop().time() < self.full_until:
            raise ResourceExhausted("full")
        self.begun += 1
        for token in range(len(request.committed), self.TOKENS):
            await asyncio.sleep(1.0)
            if self.gone or (self.poisoned and token == 2):
                raise Unavailable("gone")
            yield Progress(token_ids=(token,), queue_s=0.0, cached_tokens=0, num_drafted=0, accepted_sources=())
        yield Finished(reason=FinishReason.LENGTH)

    async def describe(self) -> VerifierCard:
        if self.gone:
            raise Unavailable("nobody there")
        return VerifierCard(
            model="lone", max_model_len=64, vocab_size=8, running=0, waiting=0, free_blocks=1, total_blocks=1, bit_exact=True
        )


async def asked(
    verifier: Lone, timeout_s: float = 60.0, *, whole: bool = False
) -> tuple[list[int], OutriderError | None, float]:
    """The tokens that a caller sees, the error that ends them, and the seconds until the end."""
    said: list[int] = []
    began = asyncio.get_running_loop().time()
    events = Migration(verifier, timeout_s, RouterWaits().migration_s, DROPPED).generate(
        replace(request("r", [1, 2]), committed=(), whole=whole)
    )  # type: ignore[arg-type]
    error = None
    try:
        async for event in events:
            if isinstance(event, Progress):
                if event.restarted:
                    said.clear()
                said += event.token_ids
    except OutriderError as raised:
        error = raised
    return said, error, asyncio.get_running_loop().time() - began


@simulated
async def test_an_answer_waits_for_the_only_verifier_to_come_back() -> None:
    verifier = Lone(dies_at=2.5, back_at=40.0)
    said, error, took_s = await asked(verifier)
    assert (said, error, verifier.begun) == ([*range(Lone.TOKENS)], None, 2)
    assert 40.0 < took_s < 40.0 + 4.0 + Lone.TOKENS


@simulated
async def test_it_waits_before_its_first_token_as_well() -> None:
    said, error, _ = await asked(Lone(dies_at=0.5, back_at=30.0))
    assert (said, error) == ([*range(Lone.TOKENS)], None)


@simulated
async def test_but_not_longer_than_it_is_set_to() -> None:
    said, error, took_s = await asked(Lone(dies_at=2.5, back_at=1000.0), timeout_s=20.0)
    assert said == [0, 1]
    assert isinstance(error, Unavailable)
    assert 20.0 < took_s < 30.0


@simulated
async def test_nor_longer_than_its_caller_does() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0):
            await asked(Lone(dies_at=2.5, back_at=1000.0))
    assert asyncio.get_running_loop().time() == 10.0


@simulated
async def test_a_new_request_is_refused_within_seconds() -> None:
    said, error, took_s = await asked(Lone(dies_at=0.0, back_at=1000.0))
    assert said == []
    assert isinstance(error, NotBegun)
    assert took_s < 5.0


@simulated
async def test_a_request_that_kills_it_twice_at_one_token_is_not_tried_again() -> None:
    verifier = Lone(dies_at=1000.0, back_at=1000.0, poisoned=True)
    said, error, took_s = await asked(verifier)
    assert (said, verifier.begun) == ([0, 1], 2)
    assert isinstance(error, Unavailable)
    assert took_s < 10.0


@simulated
async def test_one_that_is_back_and_full_is_waited_for_but_not_by_new_requests() -> None:
    said, error, _ = await asked(Lone(dies_at=2.5, back_at=3.5, full_until=0.0))
    assert (said, error) == ([*range(Lone.TOKENS)], None)

    class Fills(Lone):
        @override
        async def describe(self) -> VerifierCard:
            card = await super().describe()
            self.full_until = self.full_until or asyncio.get_running_loop().time() + 10.0
            return card

    now = asyncio.get_running_loop().time()
    said, error, _ = await asked(Fills(dies_at=now + 2.5, back_at=now + 3.5))
    assert (said, error) == ([*range(Lone.TOKENS)], None)
    said, error, took_s = await asked(Lone(dies_at=1e9, back_at=1e9, full_until=1e9))
    assert (said, took_s) == ([], 0.0)
    assert isinstance(error, ResourceExhausted)


class Different:
    """Implements ``VerifierPort``: verifiers of different arithmetic, asked in turn; all but the last die after two tokens."""

    TOKENS = 6

    def __init__(self, *arithmetics: str) -> None:
        self.arithmetics = arithmetics
        self.asked: list[tuple[str, str]] = []

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        own = self.arithmetics[min(len(self.asked), len(self.arithmetics) - 1)]
        self.asked.append((request.arithmetic, own))
        return self._events(request, Identity(arithmetic=own), last=len(self.asked) >= len(self.arithmetics))

    async def _events(
        self, request: GenerationRequest, own: Identity, *, last: bool
    ) -> AsyncGenerator[Progress | Finished, None]:
        own.check(request)
        begun = len(request.committed)
        for token in range(begun, self.TOKENS):
            await asyncio.sleep(1.0)
            if not last and token == begun + 2:
                raise Unavailable("gone")
            yield Progress(token_ids=(token,), arithmetic=own.arithmetic if token == begun else "")
        yield Finished(reason=FinishReason.LENGTH)

    async def describe(self) -> VerifierCard:
        return VerifierCard(
            model="m", max_model_len=64, vocab_size=8, running=0, waiting=0, free_blocks=1, total_blocks=1, bit_exact=True
        )


@simulated
async def test_an_answer_goes_on_where_the_arithmetic_is_its_own() -> None:
    verifiers = Different("a", "b", "a")
    said, error, _ = await asked(verifiers)  # type: ignore[arg-type]
    assert (said, error) == ([*range(Different.TOKENS)], None)
    assert verifiers.asked == [("", "a"), ("a", "b"), ("a", "a")]


@simulated
async def test_where_there_is_no_such_verifier_it_ends_and_both_are_named() -> None:
    said, error, took_s = await asked(Different("a", "b"), timeout_s=20.0)  # type: ignore[arg-type]
    assert said == [0, 1]
    assert isinstance(error, NotBegun)
    assert "(a)" in str(error) and "(b)" in str(error)
    assert 20.0 < took_s < 30.0


async def test_an_answer_names_its_arithmetic(tiny_model: Path) -> None:
    async with pipeline(tiny_model) as running:
        _, _, end = await answer(running.router, "suffix")
        (card,) = await running.router.models()
        assert end.arithmetic == card.arithmetic != ""
        foreign = replace(request("r", [1, 2], max_tokens=5), committed=(1,), arithmetic="other")
        with pytest.raises(NotBegun, match="other"):
            await anext(running.verifier.generate(foreign))
        assert running.verifier.loop.running == 0


@simulated
async def test_one_that_is_sent_as_a_whole_begins_once_more_where_nobody_goes_on_with_it() -> None:
    """Its verifier dies as the weights are replaced, and all that is left of the service serves the new ones."""
    verifiers = Different("a", "b")
    said, error, took_s = await asked(verifiers, whole=True)  # type: ignore[arg-type]
    assert (said, error) == ([*range(Different.TOKENS)], None)
    assert verifiers.asked == [("", "a"), *[("a", "b")] * 4, ("", "b")]
    assert took_s < 20.0
    # Where one can, it goes on.
    verifiers = Different("a", "b", "b", "a")
    said, error, _ = await asked(verifiers, whole=True)  # type: ignore[arg-type]
    assert (said, error) == ([*range(Different.TOKENS)], None)
    assert verifiers.asked[-1] == ("a", "a")
