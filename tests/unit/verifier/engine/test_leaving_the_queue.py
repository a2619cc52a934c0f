"""Who leaves the queue counts no more, though the step under way goes on: neither its place nor its name is taken."""

from __future__ import annotations

import asyncio

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.admission import Admission
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import LoopStats
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import PASS_S, decoding, simulated


async def leave(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait((task,))


@simulated
async def test_its_place_and_its_name_are_free_at_once() -> None:
    async with decoding(ToyTarget(rooms=1), max_num_seqs=1, max_waiting=1) as loop:
        served = asyncio.create_task(collect(loop, request("served", [3], PLAIN, max_tokens=20, ignore_eos=True)))
        await asyncio.sleep(PASS_S / 2)
        for _ in range(3):
            waits = asyncio.create_task(collect(loop, request("waits", [3], PLAIN, max_tokens=2)))
            await asyncio.sleep(0)
            assert loop.waiting == 1
            await leave(waits)
            assert loop.waiting == 0
        # All of that during one pass.
        assert loop.stats.times.steps == 0
        assert len((await collect(loop, request("waits", [3], PLAIN, max_tokens=2, ignore_eos=True)))[0]) == 2
        assert len((await served)[0]) == 20


@simulated
async def test_a_preempted_one_leaves_nothing_behind() -> None:
    target, drafter = ToyTarget(rows=90), RandomDrafter()
    async with decoding(target, InProcessDraftLink(drafter), headroom=0) as loop:
        first, second = (
            asyncio.create_task(collect(loop, request(name, [3], max_tokens=60, ignore_eos=True))) for name in "ab"
        )
        while not loop.stats.preemptions:
            await asyncio.sleep(PASS_S)
        assert (loop.running, loop.waiting, set(drafter.sessions)) == (1, 1, {"a", "b"})
        await leave(second)
        assert loop.waiting == 0
        await asyncio.sleep(2 * PASS_S)
        assert (set(target.kept), set(drafter.sessions)) == ({"a"}, {"a"})
        assert len((await first)[0]) == 60


@simulated
async def test_one_that_has_left_is_not_preempted_into_the_queue() -> None:
    requests = Admission(ToyTarget(rows=35), LoopConfig(headroom=0), LoopStats())
    stays, leaves = (
        LiveRequest(request(name, [3], PLAIN), frozenset(), vocab_size=8, max_model_len=64, max_nodes=4, by_paper=False)
        for name in ("stays", "leaves")
    )
    for each in (stays, leaves):
        requests.join(each)
    assert requests.admit() == [stays, leaves]
    requests.leave(leaves)
    assert requests.running.keys() == {"stays", "leaves"}
    # Its rows are needed while a step waits for drafts.
    stays.tokens += [3] * 34
    assert requests.make_room([stays], wait=False) == [stays] == [*requests.running.values()]
    assert len(requests.waiting) == 0
    assert requests.left() == [leaves]
