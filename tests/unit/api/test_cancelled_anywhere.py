"""Who waits may go at any point, or be cancelled twice: what waits for it, what it holds and what is decided stay right."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from services.access.gate import Gate
from services.access.key_records import hash_key
from services.access.key_ring import KeyRing
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.app import HttpApp
from services.api.http.responses.stored_responses import ResponsesInMemory
from services.api.lately import Lately
from services.api.readiness import Readiness
from services.fair_threads import FairThreads
from services.links.in_process import InProcessDraftLink
from services.router.adapter_changes import AdapterChanges
from services.router.pauses import Pauses
from services.router.reloads import Reloads
from services.verifier.changing.reloading import Reloading
from services.verifier.engine.loop import DecodingLoop
from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError
from speculation.reloads import ReloadOrder
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, decoding, request
from tests.running.cancelling import at_every_turn, at_every_wait
from tests.running.patience import until
from tests.servers.scripted_router import ScriptedRouter
from tests.unit.router.test_adapter_changes import ONE, Adapters, Verifier

KEY = "k" * 20
FOX = [{"role": "user", "content": "fox"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": FOX, "n": 2, "max_tokens": 5}),
    "stream": ("/v1/chat/completions", {"messages": FOX, "n": 2, "max_tokens": 5, "stream": True}),
    "completions": ("/v1/completions", {"prompt": ["fox", "dog"], "max_tokens": 5, "stream": True, "echo": True}),
    "messages": ("/v1/messages", {"messages": FOX, "max_tokens": 5, "stream": True}),
    "responses": ("/v1/responses", {"input": "fox", "max_output_tokens": 5, "stream": True}),
    "tokens": ("/tokenize", {"prompt": "fox", "return_token_strs": True}),
}


async def test_a_tokenising_thread_is_given_back() -> None:
    pool = FairThreads("tokenising", 2)

    async def beside() -> None:
        others = [asyncio.create_task(pool.run(lambda: time.sleep(0.001), 3, tenant)) for tenant in ("a", "a", "b")]
        # They have the threads.
        await asyncio.sleep(0)
        try:
            await pool.run(lambda: time.sleep(0.001), 3, "a")
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def nobody() -> None:
        await until(lambda: pool._free == 2 and not pool._of)

    assert await at_every_wait(beside, nobody) > 0


class Door:
    """An HTTP application behind a key with limits, and a client that may leave, or whose connection breaks."""

    def __init__(self, keys: Path) -> None:
        keys.write_text(f"- {{hash: {hash_key(KEY)}, id: x, tenant: t, max_concurrent: 3, tokens_per_minute: 1000000000}}\n")
        config = HttpConfig(port=0, public=PublicServerConfig(port=0))
        self.gate = Gate(KeyRing((), keys), clock=lambda: 0.0)
        self.app = HttpApp(ScriptedRouter("hello", 2), config, self.gate, ResponsesInMemory(config.responses))

    async def call(self, kind: str, *, leaves_after: int | None = None, breaks_after: int = 1000) -> int:
        """How many messages the client was sent. ``leaves_after``: turns of the event loop."""
        path, body = BODIES[kind]
        gone, told, sent = asyncio.Event(), False, 0

        async def leave(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            gone.set()

        async def receive() -> dict[str, Any]:
            nonlocal told
            if told:
                await gone.wait()
                return {"type": "http.disconnect"}
            told = True
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(_: Any) -> None:
            nonlocal sent
            await asyncio.sleep(0)
            if sent >= breaks_after:
                raise OSError("the connection is broken")
            sent += 1

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-api-key", KEY.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        leaving = None if leaves_after is None else asyncio.create_task(leave(leaves_after))
        try:
            await self.app(scope, receive, send)
        finally:
            if leaving is not None:
                leaving.cancel()
        return sent

    async def empty(self) -> None:
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert self.app._slots._taken == self.app._taken == 0
        assert not self.app._endpoints.running
        responses = cast(Any, self.app._paths["/v1/responses"].handler).__self__
        assert not responses._running
        for use in self.gate._uses.values():
            assert use._running == use._arriving == 0
            # Neither more than there was, nor what was charged for an answer that was not given.
            assert 10**9 - 2 * 40 <= use._buckets["tokens"].level <= 10**9
            use._buckets["tokens"]._level = 1e9


@pytest.mark.parametrize("kind", BODIES)
async def test_a_client_that_goes_leaves_nothing(kind: str, tmp_path: Path) -> None:
    door = Door(tmp_path / "keys.yaml")
    whole = await door.call(kind)
    await door.empty()
    for turns in range(60):
        await door.call(kind, leaves_after=turns)
        await door.empty()
    for messages in range(whole):
        # What cannot be told is told to nobody.
        await asyncio.gather(door.call(kind, breaks_after=messages), return_exceptions=True)
        await door.empty()
    assert await at_every_turn(lambda: door.call(kind), door.empty, (0, 1, 2)) > 3
    assert await door.call(kind) == whole


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rows", [1_000_000, 60])
async def test_an_answer_that_is_left_leaves_room(rows: int, depth: int) -> None:
    target, drafter, number = ToyTarget(rows=rows, depth=depth), RandomDrafter(mood="good"), 0
    async with decoding(target, InProcessDraftLink(drafter), max_num_seqs=3) as loop:

        async def beside() -> None:
            nonlocal number
            number += 1
            others = [
                asyncio.create_task(collect(loop, request(f"o{number}.{each}", [2] * 20, max_tokens=12, ignore_eos=True)))
                for each in range(4)
            ]
            await asyncio.sleep(0.001)
            try:
                wanted = request(f"r{number}", [1, 2, 3] * 5, PLAIN, max_tokens=4, ignore_eos=True)
                async with aclosing(loop.generate(wanted)) as events:
                    async for _ in events:
                        pass
            finally:
                for other in others[:2]:
                    other.cancel()
                await asyncio.gather(*others, return_exceptions=True)

        async def empty() -> None:
            await until(
                lambda: loop.running == loop.waiting == 0 and not (target.kept or target.granted or drafter.sessions)
            )

        assert await at_every_wait(beside, empty) > 3


class Weights:
    """New weights, as far as ``Reloading`` looks at them. ``held``: how many have not been dropped."""

    held = 0
    stored = ""

    def __init__(self) -> None:
        self.digest, self.config = "b", SimpleNamespace(model_path="b")
        Weights.held += 1

    def drop(self) -> None:
        Weights.held -= 1


class Weighed(ToyTarget):
    """Has one of two weights."""

    weights = "a"

    def exchange(self, weights: Weights) -> None:
        assert not self.under_way
        self.weights = "b" if self.weights == "a" else "a"


class Changed(Reloading):
    """A verifier's reloads; the files of new weights are read in no time."""

    def __init__(self, target: Weighed, loop: DecodingLoop) -> None:
        self.target, self.loop = target, loop
        super().__init__(cast(Any, target), cast(Any, SimpleNamespace()), loop, (), lambda digest: digest)

    @override
    def _loaded(self, named: str) -> Any:
        return Weights()

    async def serves(self) -> None:
        """Nothing is open, held or awaited here, and answers are given."""
        await until(lambda: not (self._one_step.locked() or self.reading.locked() or self._open))
        assert not self.loop.hold.on
        assert self.loop._requests.waiting.turns == "all"
        await collect(self.loop, request(f"after {time.perf_counter_ns()}", [1], PLAIN, max_tokens=2, ignore_eos=True))
        await until(lambda: self.loop.running == self.loop.waiting == 0)


class All:
    """Several verifiers, as a network reaches them."""

    def __init__(self, *verifiers: Any) -> None:
        self._verifiers = verifiers

    async def reload(self, order: ReloadOrder) -> str:
        return await _told([each.obey for each in self._verifiers], order)

    async def adapt(self, order: AdapterOrder) -> str:
        return await _told([each.adapt for each in self._verifiers], order)


async def _told(verifiers: list[Callable[[Any], Awaitable[str]]], order: object) -> str:
    told = await asyncio.gather(*(_sent(obey, order) for obey in verifiers), return_exceptions=True)
    for each in told:
        if isinstance(each, BaseException):
            raise each
    if len({*told}) > 1:
        raise ConfigurationError("they differ")
    return cast(str, told[0])


async def _sent(obey: Callable[[Any], Awaitable[str]], order: object) -> str:
    """Who goes before an order is on its way has given none; later, the verifier hears of that."""
    for _ in range(2):
        await asyncio.sleep(0)
    return await obey(order)


@pytest.mark.parametrize("upto", [1, 2, 3])
async def test_a_reload_whose_order_is_left_is_undone(upto: int) -> None:
    target = Weighed()
    async with decoding(target, max_num_seqs=3) as loop:
        verifier = Changed(target, loop)
        order, number = ReloadOrder(reload_id="r", step="read", folder="b", within_s=60.0, running="restart"), 0

        async def steps() -> None:
            nonlocal number
            number += 1
            answer = asyncio.create_task(collect(loop, request(f"r{number}", [2, 3], PLAIN, max_tokens=8, ignore_eos=True)))
            try:
                for step in ("read", "pause", "replace")[:upto]:
                    await verifier.obey(replace(order, step=cast(Any, step)))
            finally:
                # The router's, or that of the verifier itself, which has heard nothing for a minute.
                await asyncio.shield(asyncio.create_task(verifier.obey(replace(order, step="undo"))))
            await answer

        async def as_before() -> None:
            await until(lambda: not verifier.open)
            await verifier.serves()
            await until(lambda: not Weights.held)
            assert target.weights == "a"

        assert await at_every_wait(steps, as_before) > 3 * upto


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_a_pause_whose_order_is_left_ends(mode: Any) -> None:
    first, second = Weighed(), Weighed()
    async with decoding(first, max_num_seqs=3) as one, decoding(second, max_num_seqs=3) as other:
        verifiers = [Changed(first, one), Changed(second, other)]
        pauses, paused = Pauses(cast(Any, All(*verifiers)), 0.01), False

        async def pause() -> None:
            nonlocal paused
            await pauses.pause(mode, 60.0)
            paused = True

        async def on() -> None:
            nonlocal paused
            await asyncio.sleep(0.001)
            if paused:
                await pauses.resume()
            paused = False
            for verifier in verifiers:
                await verifier.serves()

        assert await at_every_wait(pause, on) > 0
        assert await at_every_turn(pause, on, tuple(range(8))) > 20


async def test_who_orders_a_reload_and_goes_has_it_done() -> None:
    first, second = Weighed(), Weighed()
    async with decoding(first, max_num_seqs=3) as one, decoding(second, max_num_seqs=3) as other:
        verifiers = [Changed(first, one), Changed(second, other)]
        reloads = Reloads(cast(Any, All(*verifiers)), 0.01, 1.0)

        async def reload() -> None:
            await reloads.reload("b", "restart", 60.0)

        async def both() -> None:
            if reloads._task is not None:
                await reloads._task
            assert first.weights == second.weights
            for verifier in verifiers:
                await verifier.serves()

        assert await at_every_turn(reload, both, (0, 2)) > 4


@pytest.mark.parametrize("change", ["load", "unload"])
async def test_an_adapter_is_at_all_verifiers_or_at_none(change: str) -> None:
    verifiers = [Verifier(Adapters()), Verifier(Adapters())]
    changes = AdapterChanges(cast(Any, All(*verifiers)))

    async def load() -> None:
        await changes.load("one", ONE)

    async def unload() -> None:
        await changes.unload("one")

    async def alike() -> None:
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        first, second = (each.target.adapters for each in verifiers)
        assert first == second
        assert not any(each.adapting._closed("one") for each in verifiers)
        for each in verifiers:
            each.target.adapters = {} if change == "load" else {"one": "d"}

    await alike()
    assert await at_every_turn(load if change == "load" else unload, alike, tuple(range(8))) > 20


async def test_who_asks_a_server_that_stops_hears_that_it_is_not_ready() -> None:
    class Hanging(ScriptedRouter):
        @override
        async def ready(self) -> bool:
            await asyncio.Event().wait()
            return True

    readiness = Readiness(Hanging())
    asked = asyncio.create_task(Lately(readiness.ready, False)())
    await asyncio.sleep(0.01)
    await readiness.stop()
    assert not await asked
