"""Whole services whose target is shared by ranks: answers of a given form, of chosen words, log-probabilities, hidden states and
what heads draft from them are those of one process, and an answer moves from one to the other and back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.service import VerifierService
from speculation.messages import GenerationRequest, Progress
from speculation.sources import STRATEGIES
from tests.engine.fakes import PLAIN
from tests.engine.layouts import LAYOUTS, ONE_PROCESS, Layout
from tests.engine.stage_threads import launch_thread
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_words
from tests.lossless.suites import OTHERS
from tests.lossless.test_lora_is_lossless import DRAFTED, PROMPTS, SAMPLING, asked, said, verifier
from tests.lossless.test_strategies import plan_of
from tests.lossless.test_structured import answers
from tests.lossless.test_tensor_parallel import config
from tests.running.patience import PATIENCE_S
from tests.tiny_models.trained_heads import heads_beside

pytestmark = needs_kernels

# Two ranks in `make test`.
over = pytest.mark.parametrize(
    "layout",
    [pytest.param(LAYOUTS[name], id=name, marks=() if name == "2 ranks" else pytest.mark.exhaustive) for name in OTHERS],
)


async def moves(one: VerifierService, two: VerifierService, wanted: GenerationRequest, answer: Sequence[int]) -> None:
    """Let an answer begin at either, go on at the other, and end where it began."""
    for first, second in ((one, two), (two, one)):
        begun, arithmetic = await broken_off(first, wanted, 20)
        assert arithmetic
        moved = replace(wanted, committed=tuple(begun), arithmetic=arithmetic)
        # And back, once more. By another id, as a router does: the one left may still end where it began.
        more, _ = await broken_off(second, moved, 20)
        again = replace(moved, request_id=f"{wanted.request_id}.1", committed=(*begun, *more))
        assert [*begun, *more, *await said(first, again)] == answer


async def broken_off(running: VerifierService, wanted: GenerationRequest, after: int) -> tuple[list[int], str]:
    """The first tokens of an answer, and the arithmetic that they were chosen by."""
    begun: list[int] = []
    arithmetic = ""
    events = running.generate(wanted)
    async for event in events:
        assert isinstance(event, Progress)
        begun += event.token_ids
        arithmetic = event.arithmetic or arithmetic
        if len(begun) >= after:
            break
    await events.aclose()
    return begun, arithmetic


@over
async def test_an_answer_moves_between_one_process_and_ranks(tiny_model: Path, layout: Layout) -> None:
    async with verifier(tiny_model, {}) as one, verifier(tiny_model, {}, **asdict(layout)) as two:
        for sampling in SAMPLING:
            wanted = asked("", PROMPTS[1], DRAFTED, **sampling)
            answer = await said(one, replace(wanted, request_id=f"{wanted.request_id}.plain", plan=PLAIN))
            await moves(one, two, wanted, answer)


@over
async def test_answers_of_a_form_and_log_probabilities(tiny_model: Path, layout: Layout) -> None:
    sampling: list[dict[str, object]] = [{"logprobs": 3}, {"logprobs": 3, "temperature": 0.9, "top_p": 0.95, "seed": 3}]
    async with verifier(tiny_model, {}) as one, verifier(tiny_model, {}, **asdict(layout)) as two:
        for each in sampling:
            wanted = await answers(one, PLAIN, each)
            for plan in (PLAIN, plan_of(STRATEGIES["blend"])):
                found = await answers(two, plan, each)
                for kind, (tokens, steps) in found.items():
                    assert tokens == wanted[kind][0]
                    assert told(steps) == told(wanted[kind][1])


def told(steps: Sequence[Progress]) -> list[object]:
    """The log-probabilities of an answer, to the last bit."""
    return [entry for step in steps for entry in step.logprobs]


@over
async def test_answers_of_chosen_words(tiny_model: Path, layout: Layout) -> None:
    async with verifier(tiny_model, {}) as one, verifier(tiny_model, {}, **asdict(layout)) as two:
        for each in test_words.SAMPLING:
            wanted = await test_words.answers(one, PLAIN, each)
            for plan in (PLAIN, plan_of(STRATEGIES["blend"])):
                assert await test_words.answers(two, plan, each) == wanted


def observed(model: Path, layout: Layout) -> list[bytes]:
    """The hidden states of a prompt and of a tree behind it."""
    target = TransformersTarget(config(model, layout.ranks, stages=layout.stages), launch_thread)
    try:
        assert target.open("a", 100)
        found = []
        for rows in (
            Rows(request_id="a", context=0, tokens=tuple(range(5, 45)), logits=1, layers=(-1, 0, 1)),
            Rows(request_id="a", context=40, tokens=(7, 8, 9, 10), parents=(-1, 0, -1), logits=4, layers=(-1, 0, 1)),
        ):
            target.begin([rows])
            target.finish()
            found.append(target.features("a", range(len(rows.tokens))).data)
            target.keep("a", rows.context, range(rows.chain))
        return found
    finally:
        target.shutdown()


@over
def test_hidden_states_have_the_same_bits(tiny_model: Path, layout: Layout) -> None:
    assert observed(tiny_model, layout) == observed(tiny_model, ONE_PROCESS)


@pytest.mark.exhaustive
@over
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
async def test_heads_draft_from_the_states_of_ranks(
    tiny_model: Path, sampling: Mapping[str, object], layout: Layout
) -> None:
    async with verifier(tiny_model, {}) as one:
        wanted = [await said(one, asked("", prompt, PLAIN, **sampling)) for prompt in PROMPTS]
    heads = {name: heads_beside(tiny_model)[name] for name in ("eagle3", "fspad", "medusa")}
    async with verifier(tiny_model, {}, **asdict(layout), models=heads, draft_deadline_s=5.0) as two:
        for name in heads:
            async with asyncio.timeout(PATIENCE_S):
                while not two.loop.stats.accepted_by_source.get(name):
                    drafted = [asked("", prompt, plan_of((name,)), **sampling) for prompt in PROMPTS]
                    assert await asyncio.gather(*(said(two, each) for each in drafted)) == wanted, name
        assert not two.loop.stats.drafts_malformed
