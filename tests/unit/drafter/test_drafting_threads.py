"""Text sources beside the event loop: on a thread of their own, and what fails costs its own nodes."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.service import DrafterService
from services.drafter.sessions.thread import DraftingThread
from services.drafter.sources.catalogue import MAKERS
from services.drafter.sources.interfaces import TreeSource
from speculation.messages import CloseSession, Draft, OpenSession, StepReport
from speculation.sources import SOURCES, SourceSpec
from speculation.tree import chain
from speculation.types import TokenTree
from tests.drafters.drafter_sessions import opening, report
from tests.running.patience import PATIENCE_S, until


class _Slow(TreeSource):
    def __init__(self) -> None:
        self.thread = ""
        self.enough = threading.Event()

    def open(self, message: OpenSession) -> _Slow:
        return self

    def draft(self, max_nodes: int) -> TokenTree:
        self.thread = threading.current_thread().name
        assert self.enough.wait(PATIENCE_S)
        return chain([1], "slow")

    def observe(self, report: StepReport) -> None: ...

    def close(self) -> None:
        raise RuntimeError("planted failure")


async def test_text_sources_do_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    monkeypatch.setitem(SOURCES, "slow", SourceSpec(name="slow"))
    monkeypatch.setitem(MAKERS, "slow", "tests.unit.drafter.test_drafting_threads:make_slow")
    monkeypatch.setattr("tests.unit.drafter.test_drafting_threads.make_slow", lambda config: slow, raising=False)
    service = DrafterService(DrafterConfig())
    drafting = asyncio.create_task(service.open(opening("a", ("slow",))))
    await until(lambda: slow.thread)
    assert slow.thread == "drafts-text"
    # It ends when the event loop says so, which therefore runs.
    slow.enough.set()
    assert isinstance(await drafting, Draft)
    # Nobody waits for how it closes.
    service.close(CloseSession(session_id="a"))
    assert isinstance(await service.open(opening("b", ("prompt_lookup",))), Draft)


class _Failing:
    """A path source that fails in one of its calls."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _do(self, at: str) -> None:
        if at == self.at:
            raise RuntimeError("planted failure")

    def start(self) -> int:
        self._do("start")
        return 0

    def follow(self, place: int, token: int) -> int:
        self._do("follow")
        return 0

    def candidates(self, place: int) -> list[tuple[int, str]]:
        self._do("candidates")
        return [(5, "b:0")]

    def observe(self, report: StepReport) -> None:
        self._do("observe")

    def catch_up(self) -> bool:
        self._do("catch_up")
        return False

    def close(self) -> None: ...


@pytest.mark.parametrize("at", ["start", "follow", "candidates", "observe", "catch_up"])
def test_a_text_source_that_fails_costs_its_own_nodes(at: str) -> None:
    blend = BlendSession({"good": _Failing("never"), "bad": _Failing(at)}, Calibrator({"b:0": 0.5}))
    for _ in range(2):
        assert set(blend.draft(3).sources) == {"good"}
        blend.observe(report("s", (5,)))
        assert not blend.catch_up()
    blend.close()


async def test_what_takes_no_time_is_done_at_once_unless_the_thread_is_at_work() -> None:
    thread, names = DraftingThread("at work"), []

    def note() -> None:
        names.append(threading.current_thread().name)

    here = threading.current_thread().name
    await thread.run(note, expected_s=0.0001)
    await thread.run(note, expected_s=0.01)
    await thread.run(note, expected_s=0.0001)
    assert names == [here, "at work", here]
    gate = threading.Event()
    waiting = thread.run(gate.wait)
    behind = thread.run(note, expected_s=0.0001)
    assert not behind.done()
    gate.set()
    await asyncio.gather(waiting, behind)
    assert names[3:] == ["at work"]
    for function in (lambda: 1 / 0, exit):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            await thread.run(function, expected_s=0.0)


async def test_a_thread_runs_in_order_and_later_what_can_wait() -> None:
    thread, ran = DraftingThread("t"), []
    gate = threading.Event()
    first = thread.run(gate.wait)
    futures = [thread.run(ran.append, "later", later=True), *(thread.run(ran.append, n) for n in range(3))]
    gate.set()
    await asyncio.gather(first, *futures)
    assert ran == [0, 1, 2, "later"]
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="SystemExit"):
        await thread.run(exit)
    left = [thread.run(ran.append, "told"), thread.run(ran.append, "never", later=True)]
    for future in left:
        future.cancel()
    await thread.run(lambda: None, later=True)
    assert ran[-1] == "told"
    (running,) = [each for each in threading.enumerate() if each.name == "t"]
    del thread, first, futures, left
    gc.collect()
    running.join(5)
    assert not running.is_alive()
