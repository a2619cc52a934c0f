"""What the processes of a target are asked beside passes is answered, whatever happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from services.verifier.stages import beside
from services.verifier.stages.beside import Asking, Listening, refused
from speculation.errors import ConfigurationError


def read(number: int, told: Mapping[str, str]) -> str:
    if told["folder"] == "/none":
        raise ConfigurationError("no such folder")
    return f"{told['folder']} as number {number}"


class NoThreads:
    """Stands in for an executor of a process that may start no thread."""

    def __init__(self, **_: object) -> None:
        raise RuntimeError("can't start new thread")


def test_a_process_that_cannot_start_a_thread_says_so_and_answers_later_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    listening = Listening("127.0.0.1", store.port, 0)
    listening.answer("weights", read)
    listening.start()
    # Who listens no more counts as dead: else nobody would ever stop to wait.
    asking = Asking(store, range(1), lambda _: listening._listener.is_alive())

    def answer(folder: str) -> str:
        (found,) = asking.answers(asking.tell("weights", folder=folder), "reading weights").values()
        return found

    try:
        with monkeypatch.context() as patched:
            patched.setattr(beside, "ThreadPoolExecutor", NoThreads)
            assert "can't start new thread" in (refused(answer("/one")) or "")
        assert refused(answer("/none")) == "no such folder"
        assert answer("/two") == "/two as number 3"
    finally:
        listening.stop()
