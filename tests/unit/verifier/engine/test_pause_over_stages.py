"""A pause over pipeline stages takes hold between two passes, and whatever is lost or given up meanwhile holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.loop import DecodingLoop
from speculation.errors import NotBegun, TargetLost, Unavailable
from speculation.messages import Finished, GenerationRequest
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import PASS_S, decoding, simulated

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
# Of an answer: it does not end within a few passes. And of a pause that is not to end by itself.
TOKENS, LONG_S = 40, 1000.0
WHOLE, SHOWN = "abc", "xyz"


class Mortal(ToyTarget):
    """A stage that dies is also missed by who asks whether all are there."""

    @override
    def beat(self) -> None:
        super().beat()
        if self.lose_next:
            self.lose_next = False
            raise TargetLost("planted loss")


def wanted(name: str) -> GenerationRequest:
    return replace(request(name, [1, 2, ord(name) % 7], max_tokens=TOKENS, ignore_eos=True), whole=name in WHOLE)


@asynccontextmanager
async def under_way(
    depth: int, names: str
) -> AsyncIterator[tuple[DecodingLoop, Mortal, dict[str, asyncio.Task[tuple[list[int], bool]]]]]:
    """Answers that have had a few passes, at whose end nothing is held, whatever became of them."""
    target = Mortal(depth=depth)
    target.processes = max(2, depth)
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        tasks = {name: asyncio.create_task(read(loop, wanted(name))) for name in names}
        await asyncio.sleep(6 * PASS_S)
        assert loop.running == len(names)
        yield loop, target, tasks
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.sleep(depth * PASS_S)
        assert not (loop.running or loop.waiting or target.kept or target.granted or target.under_way)
        # And it goes on.
        assert (await read(loop, wanted("n")))[0] == await alone("n")


_ALONE: dict[str, list[int]] = {}


async def alone(name: str) -> list[int]:
    """An answer by plain decoding, made once."""
    if name not in _ALONE:
        async with decoding(ToyTarget()) as loop:
            _ALONE[name] = (await collect(loop, replace(wanted(name), plan=PLAIN)))[0]
    return _ALONE[name]


async def begun(names: str) -> dict[str, GenerationRequest]:
    """Requests for answers that were begun, and lost."""
    return {name: replace(wanted(name), committed=tuple((await alone(name))[:9])) for name in names}


async def read(loop: DecodingLoop, asked: GenerationRequest) -> tuple[list[int], bool]:
    """An answer as its reader has it, and whether it has begun once more."""
    tokens, again = list(asked.committed), False
    async for event in loop.generate(asked):
        if isinstance(event, Finished):
            return tokens, again
        if event.restarted:
            tokens, again = [], True
        tokens += event.token_ids
    raise AssertionError("it has no end")


def pausing(loop: DecodingLoop, *, restart: bool, within_s: float = LONG_S) -> asyncio.Task[None]:
    return asyncio.create_task(loop.pause.begin(restart=restart, within_s=within_s))


async def all_right(tasks: dict[str, asyncio.Task[tuple[list[int], bool]]], names: str, *, again: bool) -> None:
    assert [await tasks[name] for name in names] == [(await alone(name), again) for name in names]


@DEPTHS
@simulated
async def test_answers_that_nobody_has_seen_begin_again_behind_the_passes_under_way(depth: int) -> None:
    async with under_way(depth, WHOLE) as (loop, target, tasks):
        before = loop.stats.times.steps
        await pausing(loop, restart=True)
        assert loop.stats.times.steps - before <= depth
        assert loop.waiting == len(WHOLE) and not target.kept
        loop.pause.end()
        await all_right(tasks, WHOLE, again=True)


@DEPTHS
@simulated
async def test_they_do_not_wait_for_those_that_come_to_their_end(depth: int) -> None:
    async with under_way(depth, WHOLE + SHOWN) as (loop, target, tasks):
        pause = pausing(loop, restart=True)
        await asyncio.sleep((depth + 1) * PASS_S)
        assert not pause.done() and loop.waiting == len(WHOLE) and len(target.kept) == len(SHOWN)
        await pause
        await all_right(tasks, SHOWN, again=False)
        loop.pause.end()
        await all_right(tasks, WHOLE, again=True)


@DEPTHS
@pytest.mark.parametrize("restart", [False, True])
@simulated
async def test_a_stage_that_dies_in_a_pause(depth: int, restart: bool) -> None:
    names, moved = WHOLE + SHOWN if restart else SHOWN, await begun(SHOWN)
    async with under_way(depth, names) as (loop, target, tasks):
        pause = pausing(loop, restart=restart)
        await asyncio.sleep((depth + 1) * PASS_S)
        target.lose_next = True
        for name in SHOWN:
            with pytest.raises(Unavailable):
                await tasks[name]
        # Their router asks once more, behind what they have, a while after the target is there again: they end by its weights.
        await asyncio.sleep(3.0)
        assert target.recovered == 1 and not target.kept and not pause.done()
        back = {name: asyncio.create_task(read(loop, each)) for name, each in moved.items()}
        await pause
        await all_right(back, SHOWN, again=False)
        loop.pause.end()
        await all_right(tasks, names.removesuffix(SHOWN), again=True)


@simulated
async def test_a_stage_that_dies_in_a_pause_behind_a_pass_that_fails() -> None:
    """The pause waits for the answers of the lost target all the same."""
    async with under_way(2, SHOWN) as (loop, target, tasks):
        pause = pausing(loop, restart=False)
        target.fail_next = target.lose_next = True
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.sleep(3.0)
        assert target.recovered == 1 and not pause.done()
        await pause
        loop.pause.end()


@simulated
async def test_answers_that_come_back_of_a_stage_that_died_when_the_weights_are_others() -> None:
    """Of one of which something was shown nobody can go on; the other begins again, though it was to end as it had begun."""
    moved = await begun("ay")
    async with under_way(2, "x") as (loop, _, _):
        await pausing(loop, restart=False)
        late = {name: asyncio.create_task(read(loop, each)) for name, each in moved.items()}
        await asyncio.sleep(10 * PASS_S)
        assert loop.waiting == 2 and not loop.running
        loop.pause.refuse_moved()
        loop.pause.end()
        await all_right(late, "a", again=True)
        with pytest.raises(NotBegun):
            await late["y"]


@simulated
async def test_one_that_comes_back_and_whose_reader_goes_begins_for_nobody() -> None:
    moved = await begun("a")
    async with under_way(2, "x") as (loop, _, _):
        await pausing(loop, restart=False)
        late = asyncio.create_task(read(loop, moved["a"]))
        await asyncio.sleep(10 * PASS_S)
        assert loop.waiting == 1
        # The loop has not looked since.
        late.cancel()
        await asyncio.sleep(0)
        loop.pause.refuse_moved()
        loop.pause.end()
        await asyncio.sleep(3 * PASS_S)
        assert not loop.running and not loop.waiting


@DEPTHS
@pytest.mark.parametrize("how", ["it leaves", "its deadline"])
@simulated
async def test_a_reader_that_goes_in_a_pause(depth: int, how: str) -> None:
    """One whose answer goes on meanwhile, and one whose answer has begun again and waits."""
    async with under_way(depth, "ax") as (loop, target, tasks):
        if how == "its deadline":
            limited = [asyncio.create_task(asyncio.wait_for(tasks[name], 2 * (depth + 1) * PASS_S)) for name in "ax"]
        pause = pausing(loop, restart=True)
        await asyncio.sleep((depth + 1) * PASS_S)
        assert loop.waiting == loop.running == 1
        if how == "it leaves":
            for task in tasks.values():
                task.cancel()
        before = loop.stats.times.steps
        await pause
        assert loop.stats.times.steps - before <= 2 * (depth + 1)
        if how == "its deadline":
            assert [type(each) for each in await asyncio.gather(*limited, return_exceptions=True)] == [TimeoutError] * 2
        await asyncio.sleep(PASS_S)
        assert not loop.waiting and not target.kept
        loop.pause.end()


@DEPTHS
@simulated
async def test_a_pause_that_ends_before_it_has_begun(depth: int) -> None:
    async with under_way(depth, WHOLE + SHOWN) as (loop, _, tasks):
        with pytest.raises(Unavailable, match=r"still after 0.02 s \(3 of them\)"):
            await pausing(loop, restart=True, within_s=4 * PASS_S)
        await all_right(tasks, SHOWN, again=False)
        await all_right(tasks, WHOLE, again=True)


@DEPTHS
@simulated
async def test_a_stage_that_dies_while_decoding_stands_still(depth: int) -> None:
    moved = await begun(SHOWN)
    async with under_way(depth, SHOWN) as (loop, target, tasks):
        await loop.hold.begin()
        target.lose_next = True
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert all(isinstance(each, Unavailable) for each in ended) and target.recovered == 1
        # Their router asks once more, behind what they have.
        again = {name: asyncio.create_task(read(loop, each)) for name, each in moved.items()}
        await asyncio.sleep(20 * PASS_S)
        assert loop.hold.on and not loop.running
        loop.hold.end()
        await all_right(again, SHOWN, again=False)


@DEPTHS
@pytest.mark.parametrize("what", ["pause", "hold"])
@simulated
async def test_who_waits_for_a_pause_hears_that_the_verifier_was_stopped(depth: int, what: str) -> None:
    async with decoding(ToyTarget(depth=depth), InProcessDraftLink(RandomDrafter())) as loop:
        tasks = [asyncio.create_task(read(loop, wanted(name))) for name in SHOWN]
        await asyncio.sleep(4.5 * PASS_S)
        waiting = pausing(loop, restart=False) if what == "pause" else asyncio.create_task(loop.hold.begin())
        await asyncio.sleep(0)
        await loop.stop()
        with pytest.raises(Unavailable, match="was stopped"):
            async with asyncio.timeout(1.0):
                await waiting
        ended: Sequence[object] = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, Unavailable) for each in ended)
