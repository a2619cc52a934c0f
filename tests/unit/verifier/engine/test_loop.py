"""The decoding loop on a toy model: same tokens whatever the drafter does, one end per request, nothing left behind.

The clock is simulated, so that drafts come at the same steps on every machine.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from speculation.errors import Internal, InvalidArgument, PromptTooLong, ResourceExhausted, Unavailable
from speculation.messages import DraftFailure, Finished, GenerationRequest, OpenSession
from speculation.types import FinishReason, Plan
from tests.engine import fakes
from tests.engine.fakes import EOS, PLAIN, VOCAB, RandomDrafter, ToyTarget, collect, request, toy_logits
from tests.engine.simulated import PASS_S, decoding, simulated
from tests.running.patience import until

MOODS = ["random", "good", "stale", "slow", "silent", "failing", "malformed"]
SAMPLING: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {3: 4.0, 5: -100.0}, "min_tokens": 5},
    {"temperature": 1.2, "top_k": 4, "min_p": 0.05, "seed": 6},
]


async def answer(mood: str, wanted: GenerationRequest, **options: float) -> tuple[list[int], Finished]:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood=mood)), **options) as loop:
        tokens, finished, _ = await collect(loop, wanted)
    return tokens, finished


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@simulated
async def test_no_drafter_changes_a_token(sampling: dict[str, object]) -> None:
    options = {"max_tokens": 40, "ignore_eos": True, **sampling}
    plain = await answer("random", request("r", [1, 2, 3], PLAIN, **options))
    assert len(plain[0]) == 40
    for mood in MOODS:
        assert await answer(mood, request("r", [1, 2, 3], **options)) == plain, mood


@simulated
async def test_greedy_is_what_the_model_says() -> None:
    tokens, _ = await answer("good", request("r", [1, 2, 3], max_tokens=20, ignore_eos=True))
    expected = [1, 2, 3]
    for _ in range(20):
        expected.append(int(toy_logits(expected).argmax()))
    assert tokens == expected[3:]


@pytest.mark.parametrize("mood", ["random", "good"])
@simulated
async def test_alone_or_in_a_batch(mood: str) -> None:
    prompts = [[1 + i % 5, 2, i % VOCAB] * (1 + i) for i in range(12)]
    wanted = [
        request(f"r{i}", prompt, max_tokens=25, ignore_eos=True, temperature=i % 2, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    alone = [(await answer(mood, one))[0] for one in wanted]
    link = InProcessDraftLink(RandomDrafter(mood=mood))
    async with decoding(ToyTarget(), link, max_num_seqs=5, max_batched_tokens=7) as loop:
        together = await asyncio.gather(*(collect(loop, one) for one in wanted))
    assert [tokens for tokens, _, _ in together] == alone


@simulated
async def test_a_good_drafter_saves_passes() -> None:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        tokens, _, steps = await collect(loop, request("r", [1, 2, 3], max_tokens=29, ignore_eos=True))
    assert len(tokens) == 29
    # The prompt's draft has been made before the first token. Each step waits for one of its own: six nodes and a bonus token.
    assert [len(step.token_ids) for step in steps] == [1, 7, 7, 7, 7]
    assert sum(len(step.accepted_sources) for step in steps) + len(steps) == 29


@pytest.mark.parametrize("mood", ["random", "good"])
@pytest.mark.parametrize("max_tokens", range(1, 12))
@simulated
async def test_ends_exactly_at_max_tokens(mood: str, max_tokens: int) -> None:
    tokens, finished = await answer(mood, request("r", [1, 2, 3], max_tokens=max_tokens, ignore_eos=True))
    assert len(tokens) == max_tokens
    assert finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("mood", ["random", "good"])
@simulated
async def test_ends_at_a_stop_token_inside_an_accepted_block(mood: str) -> None:
    full, _ = await answer("silent", request("r", [1, 2, 3], PLAIN, max_tokens=60, ignore_eos=True))
    for stop in set(full):
        tokens, finished = await answer(
            mood, request("r", [1, 2, 3], max_tokens=60, ignore_eos=True, stop_token_ids=(stop,))
        )
        assert tokens == full[: full.index(stop) + 1]
        assert finished.reason is FinishReason.STOP


@simulated
async def test_the_models_own_end_of_text() -> None:
    full, _ = await answer("silent", request("r", [1, 2, 3], PLAIN, max_tokens=60, ignore_eos=True))
    assert EOS in full, "the toy model must say it for this test to mean anything"
    tokens, finished = await answer("good", request("r", [1, 2, 3], max_tokens=60))
    assert tokens == full[: full.index(EOS) + 1]
    assert finished.reason is FinishReason.STOP


@simulated
async def test_logprobs_are_those_of_the_tokens() -> None:
    wanted = request("r", [1, 2, 3], max_tokens=20, ignore_eos=True, temperature=1, seed=2, logprobs=3)
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        tokens, _, steps = await collect(loop, wanted)
    entries = [entry for step in steps for entry in step.logprobs]
    assert [entry.token_id for entry in entries] == tokens
    for index, entry in enumerate(entries):
        reference = toy_logits([1, 2, 3, *tokens[:index]]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(reference[entry.token_id]), abs=1e-5)
        assert len(entry.top_ids) == 3


@simulated
async def test_rejection_runs_and_is_reproducible() -> None:
    plan = Plan(strategy="test", sources=("test",), max_nodes=6, acceptance="rejection")
    wanted = request("r", [1, 2, 3], plan, max_tokens=30, ignore_eos=True, temperature=1, seed=2)
    # With the same drafts at the same steps. In time or late, they are rejected elsewhere.
    assert await answer("good", wanted) == await answer("good", wanted)
    greedy = request("r", [1, 2, 3], plan, max_tokens=30, ignore_eos=True)
    plain = request("r", [1, 2, 3], PLAIN, max_tokens=30, ignore_eos=True)
    assert (await answer("random", greedy))[0] == (await answer("random", plain))[0]


@simulated
async def test_leaving_frees_everything_within_a_step() -> None:
    target, drafter = ToyTarget(), RandomDrafter()
    async with decoding(target, InProcessDraftLink(drafter)) as loop:
        events = loop.generate(request("r", [1, 2, 3], max_tokens=400, ignore_eos=True))
        await anext(events)
        assert target.kept
        assert drafter.sessions
        await events.aclose()
        # A step takes as long as a pass.
        await asyncio.sleep(2 * PASS_S)
        assert not target.kept
        assert not drafter.sessions
        assert loop.running == loop.waiting == 0


async def test_all_that_computes_runs_in_one_thread() -> None:
    target = ToyTarget()
    async with fakes.decoding(target, InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        await asyncio.gather(*(collect(loop, request(name, [1, 2], max_tokens=20)) for name in "abc"))
    assert len(target.threads) == 1
    assert threading.current_thread().name not in target.threads


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("mood", ["good", "random", "silent", "stale"])
@simulated
async def test_several_passes_under_way_change_no_token(depth: int, mood: str) -> None:
    names = "abcde"
    wanted = [(await answer("silent", request(name, [1, 2, index], max_tokens=30)))[0] for index, name in enumerate(names)]
    target = ToyTarget(depth=depth)
    async with decoding(target, InProcessDraftLink(RandomDrafter(mood=mood))) as loop:
        asked = [collect(loop, request(name, [1, 2, index], max_tokens=30)) for index, name in enumerate(names)]
        answers = await asyncio.gather(*asked)
    assert [tokens for tokens, _, _ in answers] == wanted
    assert target.most_under_way == depth
    assert not target.kept


@simulated
async def test_leaving_while_a_pass_is_under_way() -> None:
    target = ToyTarget(depth=2)
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        staying = asyncio.create_task(collect(loop, request("a", [1], max_tokens=40, ignore_eos=True)))
        for number in range(5):
            leaving = asyncio.ensure_future(collect(loop, request(f"leaves{number}", [1], max_tokens=40, ignore_eos=True)))
            await asyncio.sleep(1.5 * PASS_S)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        assert len((await staying)[0]) == 40
        await asyncio.sleep(2 * PASS_S)
        assert not target.kept
        assert loop.running == loop.waiting == 0


@pytest.mark.parametrize("depth", [1, 2])
@simulated
async def test_who_steps_back_for_want_of_memory_loses_nothing(depth: int) -> None:
    names = "abcd"
    wanted = [
        (await answer("silent", request(name, [1, 2, index], max_tokens=60, ignore_eos=True)))[0]
        for index, name in enumerate(names)
    ]
    # Room for two whole answers, and for the beginnings of all four.
    target = ToyTarget(depth=depth, rows=230)
    async with decoding(target, InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        asked = [
            collect(loop, request(name, [1, 2, index], max_tokens=60, ignore_eos=True)) for index, name in enumerate(names)
        ]
        answers = await asyncio.gather(*asked)
        assert loop.stats.preemptions > 0
    assert [tokens for tokens, _, _ in answers] == wanted
    assert not target.kept


@simulated
async def test_a_target_that_is_lost_is_built_anew() -> None:
    target = ToyTarget(depth=2)
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        target.lose_next = True
        answers = await asyncio.gather(
            *(collect(loop, request(name, [1], max_tokens=9)) for name in "ab"), return_exceptions=True
        )
        assert all(isinstance(answer, Unavailable) for answer in answers)
        # Who comes while it is being built waits for it.
        assert len((await collect(loop, request("c", [1], max_tokens=9, ignore_eos=True)))[0]) == 9
        assert target.recovered == 1
        assert loop.healthy


@simulated
async def test_leaving_the_queue() -> None:
    async with decoding(ToyTarget(rooms=1), InProcessDraftLink(RandomDrafter())) as loop:
        first = asyncio.create_task(collect(loop, request("a", [1], max_tokens=100, ignore_eos=True)))
        await until(lambda: loop.running == 1)
        waiting = loop.generate(request("b", [1], max_tokens=5))
        task = asyncio.ensure_future(anext(waiting))
        await until(lambda: loop.waiting == 1)
        task.cancel()
        third = asyncio.create_task(collect(loop, request("c", [1], max_tokens=5, ignore_eos=True)))
        assert len((await first)[0]) == 100
        assert len((await third)[0]) == 5


@simulated
async def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    target = ToyTarget(rooms=1)
    async with decoding(target, InProcessDraftLink(RandomDrafter()), max_waiting=1, max_num_seqs=1) as loop:
        tasks = [asyncio.create_task(collect(loop, request("a", [1], max_tokens=60, ignore_eos=True)))]
        await until(lambda: loop.running == 1)
        tasks.append(asyncio.create_task(collect(loop, request("b", [1], max_tokens=5, ignore_eos=True))))
        await until(lambda: loop.waiting == 1)
        with pytest.raises(ResourceExhausted) as caught:
            await collect(loop, request("c", [1], max_tokens=5))
        assert caught.value.retry_after_s > 0
        await asyncio.gather(*tasks)


@simulated
async def test_a_failed_step_ends_its_requests_and_spares_the_next() -> None:
    target = ToyTarget()
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        target.fail_next = True
        with pytest.raises(Internal, match="log"):
            await collect(loop, request("a", [1, 2], max_tokens=10))
        tokens, _, _ = await collect(loop, request("b", [1, 2], max_tokens=10, ignore_eos=True))
        assert len(tokens) == 10
        assert not target.kept


@simulated
async def test_stopping_ends_every_request() -> None:
    async with decoding(ToyTarget(rooms=1), InProcessDraftLink(RandomDrafter())) as loop:
        tasks = [asyncio.create_task(collect(loop, request(name, [1], max_tokens=300, ignore_eos=True))) for name in "ab"]
        await until(lambda: loop.running == loop.waiting == 1)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, Unavailable)


@pytest.mark.parametrize(
    ("field", "wanted", "kind"),
    [
        ("prompt", request("r", []), InvalidArgument),
        ("prompt", request("r", [1] * 512), PromptTooLong),
        ("prompt_token_ids", request("r", [1, VOCAB]), InvalidArgument),
        ("stop_token_ids", request("r", [1], stop_token_ids=(99,)), InvalidArgument),
        ("logit_bias", request("r", [1], logit_bias={99: 1.0}), InvalidArgument),
    ],
)
@simulated
async def test_bad_requests_are_refused_by_name(field: str, wanted: GenerationRequest, kind: type[InvalidArgument]) -> None:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop:
        with pytest.raises(kind) as caught:
            await collect(loop, wanted)
        assert caught.value.field == field
        assert loop.running == loop.waiting == 0


@simulated
async def test_malformed_drafts_are_counted_and_dropped() -> None:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood="malformed"))) as loop:
        await collect(loop, request("r", [1, 2], max_tokens=10, ignore_eos=True))
        assert loop.stats.drafts_malformed > 0


@simulated
async def test_the_deadline_bounds_the_wait_and_patience_ends() -> None:
    class Mute(RandomDrafter):
        said = 0

        @override
        async def _draft(self, session_id: str, max_nodes: int):  # type: ignore[no-untyped-def]
            self.said += 1
            await asyncio.sleep(0.001 if self.said <= 3 else 3600)
            return await super()._draft(session_id, max_nodes)

    clock = asyncio.get_running_loop()
    async with decoding(ToyTarget(), InProcessDraftLink(Mute()), draft_deadline_s=0.02) as loop:
        began = clock.time()
        _, _, steps = await collect(loop, request("r", [1, 2], max_tokens=60, ignore_eos=True))
        waited = clock.time() - began - len(steps) * PASS_S
        assert loop.stats.deadline_misses > 0
    # Of 60 steps only the first few, and one in 32 after that, wait at all.
    assert waited < 0.02 * 10


@simulated
async def test_one_silent_request_delays_no_other() -> None:
    class Partial(RandomDrafter):
        @override
        async def _draft(self, session_id: str, max_nodes: int):  # type: ignore[no-untyped-def]
            if session_id == "silent":
                return DraftFailure(session_id=session_id, reason="none for you")
            return await super()._draft(session_id, max_nodes)

    drafter, clock = Partial(mood="random"), asyncio.get_running_loop()
    async with decoding(ToyTarget(), InProcessDraftLink(drafter), draft_deadline_s=0.5) as loop:
        began = clock.time()
        (_, _, silent), _ = await asyncio.gather(
            *(collect(loop, request(name, [1, 2], max_tokens=60, ignore_eos=True)) for name in ("silent", "loud"))
        )
        assert clock.time() - began - len(silent) * PASS_S < 0.5


@simulated
async def test_a_drafter_that_always_wants_to_be_reopened_is_not_indulged() -> None:
    class Clingy(RandomDrafter):
        opened = 0

        @override
        async def open(self, message: OpenSession) -> DraftFailure:
            Clingy.opened += 1
            return DraftFailure(session_id=message.session_id, reason="again", reopen=True)

    async with decoding(ToyTarget(), InProcessDraftLink(Clingy())) as loop:
        await collect(loop, request("r", [1, 2], max_tokens=30, ignore_eos=True))
    assert Clingy.opened <= 2 * 31


@simulated
async def test_a_target_that_keeps_failing_is_unhealthy_until_it_works() -> None:
    target = ToyTarget()
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        for attempt in range(3):
            assert loop.healthy
            target.fail_next = True
            with pytest.raises(Internal):
                await collect(loop, request(f"r{attempt}", [1]))
        assert not loop.healthy
        with pytest.raises(Unavailable):
            await collect(loop, request("late", [1]))


@simulated
async def test_what_cannot_be_admitted_fails_alone() -> None:
    class Cramped(ToyTarget):
        @override
        def open(self, request_id: str, *rest: Any, **more: Any) -> bool:
            if request_id == "cursed":
                raise RuntimeError("planted failure")
            return super().open(request_id, *rest, **more)

    async with decoding(Cramped(), InProcessDraftLink(RandomDrafter())) as loop:
        good = asyncio.create_task(collect(loop, request("good", [1], max_tokens=50, ignore_eos=True)))
        with pytest.raises(Internal, match="admitted"):
            await collect(loop, request("cursed", [1]))
        assert len((await good)[0]) == 50


@simulated
async def test_seeds_matter() -> None:
    answers = [
        (await answer("good", request("r", [1], max_tokens=20, ignore_eos=True, temperature=1, seed=seed)))[0]
        for seed in range(4)
    ]
    assert all(left != right for left, right in itertools.combinations(answers, 2))
