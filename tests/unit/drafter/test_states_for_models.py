"""The hidden states that models are given: those that have come, in the layers that they read, within a bound."""

from __future__ import annotations

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.drafter.sessions.known_states import BoundedStates, KnownStates
from speculation.messages import CloseSession, FeatureChunk
from tests.drafters.drafter_sessions import TEXT, opening, report, rest, row, rows
from tests.drafters.model_source import ModelDouble, register


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> ModelDouble:
    return register(monkeypatch, ModelDouble(answer=(7, 8, 9)))


async def test_a_model_is_given_the_states_that_have_come(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    service.features(FeatureChunk(session_id="a", features=rows(0, 4)))
    await service.open(opening("a"))
    await rest(service, "a")
    # What came before the session was opened is nobody's; nothing is guessed.
    assert double.masked["a"] == [0, 1, 2, 3]
    # More layers than it reads, in another order, and one position less.
    service.features(FeatureChunk(session_id="a", features=rows(0, 3, (-1, 0, 1, 2))))
    await service.step(report("a", (9, 4), features=rows(4, 6)))
    await rest(service, "a")
    assert double.masked["a"] == [3]
    assert double.states["a"] == {position: row(position) for position in (0, 1, 2, 4, 5)}
    # A layer that it reads is not there: nor is the position.
    service.features(FeatureChunk(session_id="a", features=rows(3, 4, (1, 2))))
    service.features(FeatureChunk(session_id="nobody", features=rows(0, 4)))
    await service.step(report("a", (5,), (*TEXT, 9, 4)))
    await rest(service, "a")
    assert double.masked["a"] == [3, 6]
    # Opened anew, it has none until they are told again.
    await service.open(opening("a"))
    await rest(service, "a")
    assert double.masked["a"] == [0, 1, 2, 3]


async def test_states_are_kept_for_those_that_read_them_and_no_longer(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    await service.open(opening("text", ("prompt_lookup",)))
    await service.open(opening("model"))
    for name in ("text", "model"):
        service.features(FeatureChunk(session_id=name, features=rows(0, 5)))
    assert service._states.size == 5 * 12
    service.close(CloseSession(session_id="model"))
    assert service._states.size == 0


def test_states_are_bounded_and_who_holds_most_loses_its_oldest() -> None:
    bounded, small, large = BoundedStates(12 * 10), KnownStates(), KnownStates()
    bounded.add(small, rows(0, 3))
    for start in range(0, 12, 2):
        bounded.add(large, rows(start, start + 2))
    assert bounded.size <= 12 * 10
    assert small.known(0, 20) == [0, 1, 2]
    assert large.known(0, 20) == [6, 7, 8, 9, 10, 11]
    # A row that came again is not lost with its first coming.
    bounded.add(small, rows(0, 3))
    bounded.add(large, rows(12, 14))
    assert small.known(0, 3) == [0, 1, 2]
    bounded.forget(large)
    bounded.forget(large)
    assert bounded.size == small.size
