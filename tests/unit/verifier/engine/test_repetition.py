"""A text that begins to repeat itself is noticed once, after two tokens that look-up would have had right."""

from __future__ import annotations

import random

import pytest
from typing_extensions import override

from services.verifier.engine.deciding import repetition
from services.verifier.engine.deciding.asking import AskCost, Gain, Pace, Prices
from services.verifier.engine.deciding.repetition import Repetition


def begins(text: list[int], steps: int = 1) -> list[int]:
    """The lengths of the text at which it begins to repeat itself, if so many tokens come in each step."""
    noticed = Repetition(text[:1])
    found = []
    for at in range(1, len(text), steps):
        noticed.commit(text[at : at + steps])
        if noticed.begins:
            found.append(min(at + steps, len(text)))
    return found


def test_a_repeated_passage_is_noticed_at_its_fourth_token() -> None:
    assert begins([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]) == [10]
    # Once for each passage, whatever breaks it.
    assert begins([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 99, 1, 2, 3, 4, 5]) == [9, 15]


def test_several_tokens_in_one_step() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert begins(text, 3) == [10]
    assert begins(text, 4) == [12]


def test_what_is_new_is_not_noticed() -> None:
    numbers = random.Random(1)
    assert begins([numbers.randrange(50_000) for _ in range(400)]) == []
    # Repeated pairs that go on differently each time.
    assert begins([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6]) == []


def test_the_text_before_counts() -> None:
    noticed = Repetition([1, 2, 3, 4, 5, 9])
    noticed.commit([1, 2, 3, 4])
    assert noticed.begins


def test_a_long_text_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "REMEMBERED", 6)
    # The passage is forgotten after more than six pairs, and remembered before.
    assert begins([1, 2, 3, 4, 10, 11, 12, 13, 14, 1, 2, 3, 4]) == []
    assert begins([1, 2, 3, 4, 10, 1, 2, 3, 4]) == [9]


def test_where_that_brings_nothing_it_is_a_reason_more_seldom() -> None:
    nothing, much = Gain(average_s=0.0, like_last_s=-1.0, passes=1), Gain(average_s=1.0, like_last_s=1.0, passes=1)
    prices, pace = Prices(pass_s=0.01, row_s=0.001, requests=1), Pace()

    class Costly(AskCost):
        explores = False  # type: ignore[assignment]

        @override
        def seconds(self, prices: Prices) -> float:
            return 0.002

    def due(gain: Gain, *, free: bool = True) -> bool:
        pace.restart()
        return pace.due(gain, Costly(), prices, turn=1, wanted=True, free=free, repeats=True)

    assert not due(nothing, free=False)
    assert [due(nothing) for _ in range(16)] == [count in (0, 4) for count in range(16)]
    # Once it has brought something, the next passage is reason enough again.
    assert due(much)
    assert due(nothing)
