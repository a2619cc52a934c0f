"""Requests that want one token of a pass go through it together, and get what their parts would have given them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine import loop as loop_module
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.singles import Singles, singled_out
from services.verifier.engine.verify import verify
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Rows, SingleOutcomes, SingleRows
from speculation.errors import Internal, InvalidArgument
from speculation.messages import GenerationRequest, Progress
from speculation.types import EMPTY_TREE, FinishReason
from tests.engine.fakes import EOS, PLAIN, VOCAB, RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import decoding, run, simulated


def a_request(draw: random.Random, number: int) -> GenerationRequest:
    """Most are single after their first token; the others want more of a pass."""
    sampling: dict[str, object] = {"max_tokens": draw.randint(1, 30), "ignore_eos": draw.random() < 0.5}
    kind = draw.randrange(8)
    if kind in (1, 2):
        sampling |= {"temperature": 1.0, "seed": draw.randrange(99), "top_p": draw.choice((0.7, 1.0))}
    if kind == 2:
        sampling |= {
            "repetition_penalty": 1.2,
            "min_tokens": min(3, int(str(sampling["max_tokens"]))),
            "logit_bias": {3: 2.0},
        }
    if kind == 3:
        sampling["stop_token_ids"] = (draw.randrange(VOCAB), draw.randrange(VOCAB))
    if kind == 4:
        sampling["logprobs"] = 2
    if kind == 5:
        sampling["bad_words"] = ((5,), (6, 7))
    plan = {6: None, 7: replace(PLAIN, report_passes=True)}.get(kind, PLAIN)
    return request(f"r{number}", [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], plan, **sampling)


def told(step: Progress) -> Progress:
    """What is the same in every run."""
    report = None if step.report is None else replace(step.report, seconds=0.0, waited_s=0.0)
    return replace(step, queue_s=0.0, report=report)


async def answers(seed: int, depth: int) -> tuple[list[object], DecodingLoop]:
    draw = random.Random(seed)
    wanted = [a_request(draw, number) for number in range(12)]
    target = ToyTarget(depth=depth)
    link = InProcessDraftLink(RandomDrafter(seed=seed, mood="good"))
    # The prompts come in pieces, and the cache is too small for all answers.
    async with decoding(target, link, max_num_seqs=8, max_batched_tokens=24) as loop:
        target.rows = 150
        found = await asyncio.gather(*(collect(loop, each) for each in wanted))
        assert not target.kept
    return [(tokens, finished, [told(step) for step in steps]) for tokens, finished, steps in found], loop


@pytest.mark.examples(6)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_parts(seed: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = 0

    def counted(requests: Sequence[LiveRequest]) -> tuple[Singles, list[LiveRequest]]:
        nonlocal together
        found = singled_out(requests)
        together += len(found[0])
        return found

    with monkeypatch.context() as patched:
        patched.setattr(loop_module, "singled_out", counted)
        own, loop = run(answers(seed, depth))
    monkeypatch.setattr(loop_module, "singled_out", lambda requests: (Singles([]), [*requests]))
    parts, reference = run(answers(seed, depth))
    assert together > 20
    assert own == parts
    assert loop.stats.by_strategy == reference.stats.by_strategy
    assert (loop.stats.rows, loop.stats.times.steps) == (reference.stats.rows, reference.stats.times.steps)


def live(draw: random.Random, number: int) -> LiveRequest:
    """A request that has been told a token, with its pending one left to compute."""
    stops = tuple({draw.randrange(VOCAB) for _ in range(draw.randrange(3))})
    message = request(
        f"r{number}",
        range(1, draw.randint(2, 6)),
        PLAIN,
        max_tokens=draw.randint(1, 6),
        stop_token_ids=stops,
        ignore_eos=draw.random() < 0.5,
        min_tokens=0,
    )
    found = LiveRequest(
        message, frozenset({EOS}), vocab_size=VOCAB, max_model_len=draw.choice((8, 64)), max_nodes=4, by_paper=False
    )
    found.tokens += [draw.randrange(1, VOCAB) for _ in range(draw.randrange(3))]
    found.computed = len(found.tokens) - 1
    found.say(Progress(token_ids=(1,)))
    return found


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_decided_is_what_verify_says(seed: int, columns: bool) -> None:
    draw = random.Random(seed)
    requests = [live(draw, number) for number in range(draw.randint(1, 12))]
    singles, others = singled_out(requests)
    assert (singles.requests, others) == (requests, [])
    choices = [draw.randrange(VOCAB) for _ in requests]
    if not columns:
        choices = [NOT_CHOSEN if draw.random() < 0.2 else choice for choice in choices]
    error = InvalidArgument("a", "b", "c")
    outcomes = [
        Outcome(choices=(each,), error=error if each == NOT_CHOSEN and draw.random() < 0.5 else None) for each in choices
    ]
    singles.decide(SingleOutcomes(choices) if columns else outcomes)
    ended: list[tuple[LiveRequest, FinishReason]] = []
    failed: list[tuple[LiveRequest, type[Exception]]] = []
    tokens: list[int] = []
    for each, outcome in zip(requests, outcomes, strict=True):
        try:
            verdict = verify(each, EMPTY_TREE, outcome)
        except Exception as raised:
            failed.append((each, type(raised)))
            continue
        tokens += verdict.committed
        if verdict.finish_reason is not None:
            ended.append((each, verdict.finish_reason))
    assert (singles.tokens, singles.ended) == (tokens, ended)
    assert [(each, type(raised)) for each, raised in singles.failed] == failed
    assert [rows.request_id for rows in singles.rows] == [each.id for each in singles.requests]
    assert [rows.tokens[0] for rows in singles.rows] == [each.tokens[-1] for each in singles.requests]
    assert len(singles.requests) + len(failed) == singles.load.requests == len(requests)


def test_who_goes_alone() -> None:
    draw = random.Random(1)
    requests = [live(draw, number) for number in range(3)]
    # As after a preemption.
    requests[1].computed = 0
    singles, others = singled_out(requests)
    assert (singles.requests, others) == ([requests[0], requests[2]], [requests[1]])
    for more in ({"logprobs": 0}, {"bad_words": ((1,),)}, {"allowed_token_ids": (1, 2)}):
        message = request("r", [1], PLAIN, **more)
        found = LiveRequest(message, frozenset(), vocab_size=VOCAB, max_model_len=9, max_nodes=4, by_paper=False)
        found.say(Progress(token_ids=(1,)))
        assert not found.single, more


def test_columns_are_a_sequence_of_rows() -> None:
    rows = SingleRows(["a", "b", "c"], [3, 8, 0], [5, 6, 7])
    assert len(rows) == 3
    assert [*rows] == [rows[0], rows[1], rows[2]]
    assert rows[-1] == Rows(request_id="c", context=0, tokens=(7,), logits=1)
    assert rows[1:] == [rows[1], rows[2]]
    outcomes = SingleOutcomes([4, 5])
    assert [*outcomes] == [Outcome(choices=(4,)), Outcome(choices=(5,))]
    assert [*outcomes[1:]] == [Outcome(choices=(5,))]


class Refusing(ToyTarget):
    """Chooses nothing for one request, once."""

    @override
    def finish(self) -> Sequence[Outcome]:
        names = [rows.request_id for rows in self.under_way[0]]
        found = [*super().finish()]
        if len(self.kept.get("bad", ())) > 6:
            at = names.index("bad")
            found[at] = replace(found[at], choices=(NOT_CHOSEN,))
        return found


@simulated
async def test_a_request_without_a_choice_ends_alone() -> None:
    target = Refusing()
    async with decoding(target) as loop:
        good = asyncio.create_task(collect(loop, request("good", [1, 2], PLAIN, max_tokens=20, ignore_eos=True)))
        with pytest.raises(Internal, match="chose nothing"):
            await collect(loop, request("bad", [1, 2], PLAIN, max_tokens=20, ignore_eos=True))
        assert len((await good)[0]) == 20
        assert not target.kept
        assert loop.running == 0
