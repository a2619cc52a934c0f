"""Answers of models whose layers have states: those of plain decoding, under drafts on both links, greedily, sampled and of a
given form, after preemption, at another verifier in mid-answer, and over stages of which one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.service import VerifierService
from speculation.messages import Progress
from speculation.ports import DraftLink
from speculation.sources import STRATEGIES
from speculation.types import FinishReason, Plan
from tests.drafters.draft_links import linked
from tests.engine.fakes import PLAIN, collect, origin, request
from tests.engine.stage_forks import forked_stages, services_fork
from tests.lossless.architectures import GuidedDrafter
from tests.lossless.hybrids import KINDS, make_hybrid
from tests.lossless.test_stages import ask, served
from tests.lossless.test_strategies import plan_of
from tests.running.patience import PATIENCE_S
from tests.servers.answer_forms import FORMS
from tests.servers.doors import Question, over_chat, over_grpc
from tests.servers.http_service import http_served
from tests.servers.service import pipeline
from tests.tiny_models.trained_heads import make_head, make_medusa

pytestmark = pytest.mark.xdist_group("hybrids")

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [40, 41, 42] * 20, [100 + i for i in range(70)] + [100, 101, 102], [17]]
SAMPLING: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 2, "logprobs": 2},
]
ANSWER = 24
BLEND = Plan(strategy="blend", sources=STRATEGIES["blend"], max_nodes=12, observe_top_k=6)
GUIDED = Plan(strategy="guided", sources=("guided",), max_nodes=12)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(request.param, tmp_path_factory.mktemp("hybrids") / request.param)


@asynccontextmanager
async def verifier(
    folder: Path, link: DraftLink, kv_cache_tokens: int = 2048, seqs: int = 16, **more: float
) -> AsyncIterator[VerifierService]:
    target = TargetConfig(
        model_path=str(folder),
        kv_cache_tokens=kv_cache_tokens,
        max_model_len=min(256, kv_cache_tokens),
        threads=1,
        pass_requests=seqs,
    )
    loop = LoopConfig(max_batched_tokens=50, max_num_seqs=seqs, **more)
    running = VerifierService(VerifierConfig(model_name="hybrid", target=target, loop=loop, budget="fixed"), [origin(link)])
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


async def said(
    running: VerifierService,
    plan: Plan,
    sampling: dict[str, object],
    *,
    together: bool = True,
    answer: int = ANSWER,
    committed: Sequence[Sequence[int]] = ((),) * len(PROMPTS),
) -> list[list[int]]:
    """The answers to the prompts, without what was committed of them before."""
    wanted = [
        replace(request(f"r{number}", prompt, plan, max_tokens=answer, ignore_eos=True, **sampling), committed=tuple(before))
        for number, (prompt, before) in enumerate(zip(PROMPTS, committed, strict=True))
    ]
    if together:
        results = await asyncio.gather(*(collect(running.loop, one) for one in wanted))
    else:
        results = [await collect(running.loop, one) for one in wanted]
    return [tokens for tokens, _, _ in results]


@pytest.mark.parametrize(("link", "sampling"), [("in_process", 0), ("grpc", 1)])
async def test_drafts_change_no_token(folder: Path, link: str, sampling: int) -> None:
    asked = SAMPLING[sampling]
    async with linked(DrafterService(DrafterConfig()), link) as drafts, verifier(folder, drafts) as running:
        plain = await said(running, PLAIN, asked, together=False)
        assert await said(running, PLAIN, asked) == plain
        for together in (False, True):
            assert await said(running, BLEND, asked, together=together) == plain
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain, strict=True)]
    async with linked(GuidedDrafter(300, whole), link) as drafts, verifier(folder, drafts) as running:
        assert await said(running, GUIDED, asked) == plain
        half = [answer[:11] for answer in plain]
        # Another verifier goes on with an answer, from its prompt and what was committed.
        assert await said(running, GUIDED, asked, committed=half) == [answer[11:] for answer in plain]


async def test_answers_of_a_given_form(folder: Path) -> None:
    """The walk's own rule steps with the states: a grammar drafts what it forces, along with whatever the others draft."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    link = InProcessDraftLink(DrafterService(DrafterConfig()))
    by_grammar = 0
    async with verifier(folder, link) as running:
        for sampling in SAMPLING:
            plain = {kind: await formed(running, kind, PLAIN, sampling) for kind in FORMS}
            found = await asyncio.gather(*(formed(running, kind, BLEND, sampling) for kind in FORMS))
            for (kind, (tokens, _)), (drafted, steps) in zip(plain.items(), found, strict=True):
                assert FORMS[kind].has(tokenizer.decode(tokens)), (kind, sampling)
                assert drafted == tokens, (kind, sampling)
                by_grammar += sum(step.accepted_sources.count("grammar") for step in steps)
    assert by_grammar


async def formed(
    running: VerifierService, kind: str, plan: Plan, sampling: dict[str, object]
) -> tuple[list[int], list[Progress]]:
    """An answer of a form, which it ends by itself."""
    wanted = request(f"r {kind}", PROMPTS[0], plan, max_tokens=200, structured_outputs=FORMS[kind].structured, **sampling)
    tokens, finished, steps = await collect(running.loop, wanted)
    assert finished.reason is FinishReason.STOP, kind
    return tokens, steps


@pytest.mark.exhaustive
async def test_preempted_requests_and_few_states(folder: Path) -> None:
    link = InProcessDraftLink(DrafterService(DrafterConfig()))
    async with verifier(folder, link) as running:
        plain = await said(running, PLAIN, SAMPLING[1], together=False, answer=60)
    async with verifier(folder, link, kv_cache_tokens=192, headroom=0) as running:
        assert await said(running, BLEND, SAMPLING[1], answer=60) == plain
        assert running.loop.stats.preemptions > 0
    async with verifier(folder, link, seqs=2) as running:
        assert await said(running, BLEND, SAMPLING[1], answer=60) == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
async def test_two_stages_of_which_one_is_killed(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services_fork(monkeypatch)
    folder = make_hybrid(model_type, tmp_path / "model")
    async with pipeline(folder) as running:
        wanted = [await ask(running, "prompt_lookup", number) for number in range(3)]
        assert [await ask(running, "autoregressive", number) for number in range(3)] == wanted
    async with served(folder, 2) as running:
        assert await asyncio.gather(*(ask(running, "auto", number) for number in range(3))) == wanted
        children = forked_stages()
        asked = [asyncio.create_task(ask(running, "prompt_lookup", number)) for number in range(3)]
        while not running.verifier.loop.running:
            await asyncio.sleep(0.005)
        os.kill(children[-1].pid, signal.SIGKILL)
        assert await asyncio.gather(*asked) == wanted


def test_choices_are_answers_of_their_own(folder: Path) -> None:
    """Several answers to one prompt begin at its kept state, and are those of single requests with their seeds."""
    fox = {"role": "user", "content": "the lazy fox " * 12}
    question = Question(conversation=(fox,), sampling={"max_tokens": ANSWER, "ignore_eos": True, "seed": 11}, choices=3)
    with http_served(folder, "verifier.mamba_block_size=64") as service:
        wanted = over_grpc(service, question, False)
        assert len({told.tokens for told in wanted}) == 3
        assert [told.tokens for told in over_chat(service, question, True)] == [told.tokens for told in wanted]
        assert service.pipeline.verifier.loop.stats.prompt_tokens_cached > 0


@pytest.mark.parametrize("model_type", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.exhaustive)])
async def test_heads_draft_from_hidden_states(model_type: str, tmp_path: Path) -> None:
    folder = make_hybrid(model_type, tmp_path / "model")
    heads = {"medusa": make_medusa(folder, tmp_path / "medusa"), "eagle": make_head(folder, tmp_path / "eagle", "eagle")}
    drafter = DrafterService(DrafterConfig(trained=TrainedConfig(checkpoints=heads, target=folder)))
    async with verifier(folder, InProcessDraftLink(drafter), draft_deadline_s=5.0) as running:
        plain, taken = await said(running, PLAIN, SAMPLING[1], together=False), running.loop.stats.accepted_by_source
        for name in heads:
            async with asyncio.timeout(PATIENCE_S):
                while not taken.get(name):
                    assert await said(running, plan_of((name,)), SAMPLING[1]) == plain, name
        assert not running.loop.stats.drafts_malformed
