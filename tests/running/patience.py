"""How long tests wait for what must come: slowness may make them slower, and must not make them fail."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from services.verifier.engine.deciding.draft_wait import DraftWait
from services.verifier.engine.deciding.waiting import Missing, Waiting
from services.verifier.engine.mailbox import Mailbox

_Told = TypeVar("_Told")

# Longer than anything takes on two busy cores, and shorter than pytest's own limit.
PATIENCE_S = 120.0


def held_pauses(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> asyncio.Event:
    """From now on, ``asyncio.sleep`` in ``module`` takes as long as the test wants: until the event is set.

    In this thread alone: a service of other tests may use the module in its own.
    """
    over, own = asyncio.Event(), threading.get_ident()

    async def pause(seconds: float) -> None:
        await (over.wait() if threading.get_ident() == own else asyncio.sleep(seconds))

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    return over


def held_timeout(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Callable[[], None]:
    """From now on, a time limit that ``module`` sets with ``asyncio.timeout`` ends when the test calls what this returns.

    In this thread alone, as with ``held_pauses``.
    """
    limits, own = list[asyncio.Timeout](), threading.get_ident()

    def limit(seconds: float | None) -> asyncio.Timeout:
        if threading.get_ident() != own:
            return asyncio.timeout(seconds)
        limits.append(asyncio.timeout(None))
        return limits[-1]

    def end() -> None:
        for each in limits:
            each.reschedule(asyncio.get_running_loop().time())

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": limit}))
    return end


def wait_for_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a fixed budget, every step asks for drafts and waits for them, however long they take: a busy machine uses them
    as an idle one does."""

    def seconds(self: Waiting, missing: Sequence[Missing], *rest: object, **more: object) -> float:
        return PATIENCE_S if missing else 0.0

    begin = DraftWait.__init__

    def patient(self: DraftWait, *given: Any) -> None:
        begin(self, *given)
        self._most_named_s = PATIENCE_S

    monkeypatch.setattr(Waiting, "seconds", seconds)
    monkeypatch.setattr(DraftWait, "__init__", patient)
    monkeypatch.setattr(Mailbox, "asks", lambda self, now: True)


async def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true.

    Raises:
        TimeoutError: it has not become so within ``PATIENCE_S``.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def at_rest(told: Callable[[], _Told], for_s: float = 0.2) -> _Told:
    """What ``told()`` gives, once it has been the same for so many seconds.

    Raises:
        TimeoutError: it has not been so within ``PATIENCE_S``.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            before = told()
            await asyncio.sleep(for_s)
            if told() == before:
                return before


def end_thread(thread: threading.Thread, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Tell a service that runs in a loop and a thread of its own to end, and wait for it; fail, and say why, if it does not."""
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    if thread.is_alive():
        for task in asyncio.all_tasks(loop):
            _print_stack(task)
        faulthandler.dump_traceback()
        raise AssertionError("the service has not stopped: stderr says what it waits for")


def _print_stack(task: asyncio.Task[object]) -> None:
    """Say what a task waits for. Unlike ``task.print_stack`` it goes down to the innermost coroutine, compiled ones included."""
    print(task, file=sys.stderr)
    waiting: object = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        print(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}", file=sys.stderr)
        waiting = getattr(waiting, "cr_await", None)
