"""A verifier that dies in mid-answer: another one goes on, nothing lost, nothing twice, the same tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import ActorDiedError

from cluster.build import Pipeline
from cluster.serve_link import translate
from services.client_api import ClientRequest, Completion, RequestedSampling, TextChunk
from services.not_begun import NodeTaken, NotBegun
from services.router import service
from services.router.config import RouterConfig
from services.router.service import RouterService
from speculation.errors import Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard
from tests.service import pipeline


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


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 20}],
    ids=str,
)
async def test_the_answer_goes_on(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, sampling: dict[str, object]
) -> None:
    monkeypatch.setattr(service, "_MIGRATION_DELAYS_S", (0.0, 0.0, 0.0))
    async with pipeline(tiny_model) as running:
        expected = await answer(running.router, strategy, **sampling)
        # At 50 all is said, and only the terminal message is lost.
        for after in (0, 1, 7, 50):
            router = RouterService(RouterConfig(model_path=str(tiny_model)), Mortal(running, after, lives=3 if after else 1))
            text, tokens, completion = await answer(router, strategy, **sampling)
            assert (text, tokens) == expected[:2]
            assert completion.completion_tokens == 50
        assert running.verifier.loop.running == 0


@pytest.mark.parametrize(
    ("error", "tried"),
    [(Unavailable, 2), (NotBegun, 4), (NodeTaken, 4)],
    ids=["two verifiers may fail at it", "all may refuse to begin", "all may lose their machines"],
)
async def test_but_not_for_ever(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, error: type[Unavailable], tried: int
) -> None:
    monkeypatch.setattr(service, "_MIGRATION_DELAYS_S", (0.0, 0.0, 0.0))
    async with pipeline(tiny_model) as running:
        verifier = Mortal(running, 0, lives=10, error=error)
        router = RouterService(RouterConfig(model_path=str(tiny_model)), verifier)
        with pytest.raises(Unavailable):
            await answer(router, "prompt_lookup")
        assert 10 - verifier.lives == tried


async def test_a_new_call_outlives_a_lost_node_during_a_roll_out(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One verifier is replaced before the first token, and the next one's machine goes: neither says anything of the call."""
    monkeypatch.setattr(service, "_MIGRATION_DELAYS_S", (0.0, 0.0, 0.0))
    async with pipeline(tiny_model) as running:
        expected = await answer(running.router, "prompt_lookup")

        class Unlucky(Mortal):
            """Dies twice, the second time of another cause."""

            async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
                self.error = Unavailable if self.lives == 2 else NodeTaken
                async for event in super().generate(request):
                    yield event

        router = RouterService(RouterConfig(model_path=str(tiny_model)), Unlucky(running, 0, lives=2))
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


async def test_a_request_that_fails_at_one_token_is_tried_on_two(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MIGRATION_DELAYS_S", (0.0, 0.0, 0.0))
    async with pipeline(tiny_model) as running:

        class Poisoned(Mortal):
            """Dies whenever the answer has come to 9 tokens."""

            async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
                self.after = 9 - len(request.committed)
                async for event in super().generate(request):
                    yield event

        verifier = Poisoned(running, 9, lives=10)
        router = RouterService(RouterConfig(model_path=str(tiny_model)), verifier)
        with pytest.raises(Unavailable):
            await answer(router, "autoregressive")
        assert 10 - verifier.lives == 2
