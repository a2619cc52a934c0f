"""Whoever orders weights to be replaced may go at any point: its call is cancelled, and what a thread does goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.build import Pipeline
from services.verifier.changing import reloading
from services.verifier.model.new_weights import NewWeights
from services.verifier.stages import split_weights
from services.verifier.stages.split_weights import StageWeights
from speculation.errors import TargetLost, Unavailable
from speculation.reloads import ReloadOrder
from tests.running.patience import PATIENCE_S
from tests.servers.service import pipeline
from tests.tiny_models.weight_versions import Versions, answered, wanted


def flag(versions: Versions) -> str:
    return f"verifier.weights_from=['{versions.folder}']"


def order_for(folder: Path) -> ReloadOrder:
    return ReloadOrder(reload_id="r", step="read", folder=str(folder), within_s=10.0)


class Slow:
    """A function that begins when it is called, and ends when the test says so."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.at_once = self.most = 0

    def __call__(self, *given: Any) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        try:
            return self._function(*given)
        finally:
            self.at_once -= 1


async def left(running: Pipeline, order: ReloadOrder, slow: Slow) -> None:
    """Order a step, and go while a thread takes it; twice, since who is cancelled may be so again."""
    call = asyncio.create_task(running.verifier.reload(order))
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
    for _ in range(2):
        call.cancel()
        await asyncio.sleep(0.01)
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("step", ["replace", "undo"])
async def test_who_goes_while_weights_are_exchanged(versions: Versions, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline(versions.folder / "a", flag(versions)) as running:
        order, target = order_for(versions.folder / "b"), running.verifier._target
        for before in ("read", "pause", "replace") if step == "undo" else ("read", "pause"):
            await running.verifier.reload(replace(order, step=before))
        with monkeypatch.context() as patch:
            patch.setattr(target, "exchange", slow := Slow(target.exchange))
            await left(running, replace(order, step=step), slow)
        await running.verifier.reload(replace(order, step="undo"))
        versions.check(0, await answered(running.router, wanted(0)), "a")


async def test_weights_that_are_ordered_twice_are_exchanged_once(versions: Versions) -> None:
    async with pipeline(versions.folder / "a", flag(versions)) as running:
        order = order_for(versions.folder / "b")
        for step in ("read", "pause", "replace", "replace", "keep"):
            await running.verifier.reload(replace(order, step=step))
        versions.check(0, await answered(running.router, wanted(0)), "b")


async def test_weights_that_lose_the_target_serve_under_their_name(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline(versions.folder / "a", flag(versions)) as running:
        order, target, rebuilt = order_for(versions.folder / "b"), running.verifier._target, threading.Event()
        exchange, recover = target.exchange, target.recover

        def losing(weights: Any) -> None:
            exchange(weights)
            raise TargetLost("planted loss")

        monkeypatch.setattr(target, "exchange", losing)
        monkeypatch.setattr(target, "recover", lambda: (recover(), rebuilt.set()))
        for step in ("read", "pause", "replace"):
            await running.verifier.reload(replace(order, step=step))
        # While nothing is asked.
        assert await asyncio.to_thread(rebuilt.wait, PATIENCE_S)
        await running.verifier.reload(replace(order, step="keep"))
        versions.check(0, await answered(running.router, wanted(0)), "b")


async def test_who_goes_while_weights_are_read_leaves_no_second_reader(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline(versions.folder / "a", flag(versions)) as running:
        order, target = order_for(versions.folder / "b"), running.verifier._target
        monkeypatch.setattr(target, "new_weights", slow := Slow(target.new_weights))
        dropped = list[threading.Thread]()
        monkeypatch.setattr(NewWeights, "drop", lambda weights: dropped.append(threading.current_thread()))
        call = asyncio.create_task(running.verifier.reload(order))
        assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
        call.cancel()
        another = asyncio.create_task(running.verifier.reload(replace(order, reload_id="another")))
        await asyncio.sleep(0.05)
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        await another
        assert slow.most == 1
        # What nobody has any more takes a moment to give back, and not the event loop's.
        assert len(dropped) == 1 and dropped[0] is not threading.main_thread()
        await running.verifier.reload(replace(order, reload_id="another", step="undo"))
        versions.check(0, await answered(running.router, wanted(0)), "a")


async def test_weights_are_read_once_the_memory_of_those_before_is_given_back(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pipeline(versions.folder / "a", flag(versions)) as running:
        order, target, read = order_for(versions.folder / "b"), running.verifier._target, list[object]()
        load = target.new_weights
        monkeypatch.setattr(target, "new_weights", lambda config: (read.append(config), load(config))[1])
        monkeypatch.setattr(NewWeights, "drop", slow := Slow(lambda: None))
        await running.verifier.reload(order)
        await running.verifier.reload(replace(order, step="undo"))
        another = asyncio.create_task(running.verifier.reload(replace(order, reload_id="another")))
        assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
        await asyncio.sleep(0.1)
        assert len(read) == 1
        slow.go_on.set()
        await another
        assert len(read) == 2
        await running.verifier.reload(replace(order, reload_id="another", step="undo"))


async def test_where_no_thread_can_be_started_weights_may_be_read_later(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with pipeline(versions.folder / "a", flag(versions)) as running:
        order = order_for(versions.folder / "b")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(Unavailable, match="no thread can be started to read the weights"):
                await running.verifier.reload(order)
        assert await running.verifier.reload(order)
        await running.verifier.reload(replace(order, step="undo"))


async def test_memory_is_given_back_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    dropped = list[bool]()
    weights: Any = SimpleNamespace(drop=lambda: dropped.append(True))
    stage = StageWeights(SimpleNamespace(answer=lambda *_: None), lambda folder: weights)  # type: ignore[arg-type]
    stage._held[1] = weights
    with monkeypatch.context() as patch:
        patch.setattr(split_weights, "threading", SimpleNamespace(Thread=full))
        stage.drop(1)
        patch.setattr(reloading, "asyncio", SimpleNamespace(to_thread=full))
        await reloading._dropped(weights)
    assert dropped == [True, True]
