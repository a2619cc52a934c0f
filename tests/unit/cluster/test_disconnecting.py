"""Who leaves Ray asks it for nothing afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from ray.serve._private.long_poll import LongPollClient, LongPollState

from cluster.ray.leaving import end_listening
from tests.running.patience import PATIENCE_S


class Controller:
    """Serve's controller, as its listeners see it: keeps each question until the test answers it."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.answers: list[Callable[[object], None]] = []
        self.listen_for_change = SimpleNamespace(remote=self._listen)

    def _listen(self, _known: object) -> object:
        return SimpleNamespace(_on_completed=self._keep)

    def _keep(self, answer: Callable[[object], None]) -> None:
        self.answers.append(answer)
        self.asked.release()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """In a thread of its own, as Serve's is."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def test_listeners_ask_until_they_are_ended(loop: asyncio.AbstractEventLoop) -> None:
    controller = Controller()
    listener = LongPollClient(controller, {}, loop, "ours")
    assert controller.asked.acquire(timeout=PATIENCE_S)
    controller.answers[-1](LongPollState.TIME_OUT)
    assert controller.asked.acquire(timeout=PATIENCE_S)
    # An answer that comes just before the end: its next question is already in the loop's queue.
    held = threading.Event()
    loop.call_soon_threadsafe(held.wait)
    controller.answers[-1](LongPollState.TIME_OUT)
    ending = threading.Thread(target=end_listening)
    ending.start()
    held.set()
    ending.join()
    seen = len(controller.answers)
    controller.answers[-1](LongPollState.TIME_OUT)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
    assert len(controller.answers) == seen
    assert not listener.is_running
