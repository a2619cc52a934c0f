"""Answers checked in service: a wrong one is counted and named, a right one is not, and a check gives way to requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.links.in_process import InProcessDraftLink
from services.metrics.prometheus_sink import PrometheusSink
from services.verifier.checks.self_check import SelfCheck
from speculation.messages import Finished, GenerationRequest, Progress
from speculation.types import FinishReason, Plan
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, decoding, request
from tests.engine.simulated import run


class Decoder:
    """Answers with the same tokens each time, one second each; counts itself as running."""

    def __init__(self) -> None:
        self.tokens = [5, 6, 7]
        self.arithmetic = "a"
        self.running = 0
        self.waiting = 0
        self.asked: list[GenerationRequest] = []

    async def generate(self, wanted: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        self.asked.append(wanted)
        self.running += 1
        try:
            for token in self.tokens[len(wanted.committed) :]:
                await asyncio.sleep(1)
                yield Progress(token_ids=(token,), arithmetic=self.arithmetic)
            yield Finished(reason=FinishReason.LENGTH)
        finally:
            self.running -= 1


def counted(sink: PrometheusSink, name: str) -> float | None:
    families = text_string_to_metric_families(sink.exposition().decode())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return found.get(f"outrider_{name}")


async def answered(check: SelfCheck, decoder: Decoder, wanted: GenerationRequest) -> None:
    async for _ in check.watched(wanted, decoder.generate(wanted)):
        pass


ASKED = replace(request("r", [1, 2]), tenant="acme", committed=(5,))


@pytest.mark.parametrize("now", [[5, 6, 7], [5, 6, 8], [5, 6], [5, 6, 7, 8]], ids=str)
def test_an_answer_that_plain_decoding_would_not_give_is_counted(now: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> PrometheusSink:
        sink, decoder = PrometheusSink(), Decoder()
        check = SelfCheck(decoder, 1, sink)
        await answered(check, decoder, ASKED)
        decoder.tokens = now
        await asyncio.sleep(30)
        again = decoder.asked[1]
        assert (again.plan.speculates, again.tenant, again.committed, again.prompt) == (False, None, (), (1, 2))
        return sink

    sink = run(main())
    wrong = now != [5, 6, 7]
    assert counted(sink, "lossless_checks_total") == 1
    assert (counted(sink, "lossless_check_failures_total") or 0) == wrong
    assert ("differs from plain decoding at token" in caplog.text) == wrong


def test_an_answer_of_weights_that_have_been_replaced_is_not_compared() -> None:
    async def main() -> PrometheusSink:
        sink, decoder = PrometheusSink(), Decoder()
        check = SelfCheck(decoder, 1, sink)
        await answered(check, decoder, ASKED)
        decoder.tokens, decoder.arithmetic = [5, 6, 8], "b"
        await asyncio.sleep(30)
        assert len(decoder.asked) == 2
        return sink

    sink = run(main())
    assert not counted(sink, "lossless_checks_total") and not counted(sink, "lossless_check_failures_total")


@pytest.mark.parametrize(
    ("plan", "every", "checked"),
    [
        (ASKED.plan, 2, 2),
        (ASKED.plan, 0, 0),
        (PLAIN, 1, 0),
        (Plan(strategy="test", sources=("test",), max_nodes=6, acceptance="rejection"), 1, 0),
    ],
)
def test_which_answers_are_checked(plan: Plan, every: int, checked: int) -> None:
    async def main() -> float | None:
        sink, decoder = PrometheusSink(), Decoder()
        check = SelfCheck(decoder, every, sink)
        for _ in range(4):
            await answered(check, decoder, replace(ASKED, plan=plan))
            await asyncio.sleep(30)
        return counted(sink, "lossless_checks_total")

    assert (run(main()) or 0) == checked


def test_a_check_gives_way() -> None:
    async def main() -> tuple[float | None, int]:
        sink, decoder = PrometheusSink(), Decoder()
        check = SelfCheck(decoder, 1, sink)
        decoder.waiting = 1
        await answered(check, decoder, ASKED)
        await asyncio.sleep(30)
        assert len(decoder.asked) == 1, "it waits for a pause"
        decoder.waiting = 0
        await asyncio.sleep(1.1)
        assert len(decoder.asked) == 2
        decoder.waiting = 1
        await asyncio.sleep(30)
        await answered(check, decoder, ASKED)
        await check.forget("another")
        decoder.waiting = 0
        await check.forget("acme")
        await asyncio.sleep(100)
        return counted(sink, "lossless_checks_total"), len(decoder.asked)

    checks, asked = run(main())
    assert (checks or 0) == 0
    assert asked == 3, "the forgotten tenant's answer is not decoded again"


async def test_the_loop_itself_passes() -> None:
    sink = PrometheusSink()
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        check = SelfCheck(loop, 1, sink)
        wanted = request("r", [1, 2, 3], max_tokens=30, temperature=1.0, seed=4)
        async for _ in check.watched(wanted, loop.generate(wanted)):
            pass
        async with asyncio.timeout(30):
            while not counted(sink, "lossless_checks_total"):
                await asyncio.sleep(0.05)
        await check.stop()
    assert not counted(sink, "lossless_check_failures_total")
