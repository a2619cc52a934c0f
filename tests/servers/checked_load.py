"""Clients that check every answer, on a service in which something is going on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from outrider import Client
from tests.running.patience import PATIENCE_S

OPTIONS: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0, "strategy": "prompt_lookup"}


def prompt(number: int) -> list[int]:
    """A prompt that none of another number begins like."""
    return [40 + number, 41, 42] * 12


def plain_answers(address: str, count: int = 4) -> dict[int, tuple[int, ...]]:
    """What plain decoding says to the first prompts, each with its number as the seed."""
    plain = OPTIONS | {"strategy": "autoregressive"}
    with Client(address) as client:
        return {n: client.generate(token_ids=prompt(n), seed=n, **plain).token_ids for n in range(count)}


def wait_until(condition: Callable[[], bool], seconds: float = 240, every_s: float = 0.2) -> None:
    """Wait until ``condition`` holds, looking every so often; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(every_s)


class Load:
    """Clients that ask one after the other, each answer checked against ``expected``, until it is stopped.

    Args:
        pause_s: how long each client rests between two answers, so that what goes on gets the processor. Where much goes on,
            answers take so long that most clients are within one at any time.
    """

    def __init__(self, address: str, expected: dict[int, tuple[int, ...]], clients: int = 4, pause_s: float = 0.5) -> None:
        self._address, self._expected, self._pause_s = address, expected, pause_s
        self._stop = threading.Event()
        self.answers, self.failures = 0, list[BaseException]()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._stop.wait(self._pause_s):
            number = (number + 1) % len(self._expected)
            try:
                # One call, one stream, no retry by the client once it has begun.
                with Client(self._address) as client:
                    answer = client.generate(token_ids=prompt(number), seed=number, **OPTIONS)
                assert answer.token_ids == self._expected[number], number
                self.answers += 1
            except BaseException as error:
                self.failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
