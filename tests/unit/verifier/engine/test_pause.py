"""What a pause says that did not begin in time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.verifier.engine.admission import Admission
from services.verifier.engine.pause import Pause
from speculation.errors import Unavailable


class _Line(list[Any]):
    turns = "all"


@pytest.mark.parametrize(
    ("running", "said"),
    [(2, "answers were under way still after 0.01 s (2 of them)"), (0, "a pass was running still after 0.01 s")],
)
async def test_it_says_what_did_not_end(running: int, said: str) -> None:
    pause, requests = _pause(running)
    with pytest.raises(Unavailable) as refused:
        await pause.begin(restart=False, within_s=0.01)
    assert str(refused.value).startswith(said)
    assert requests.waiting.turns == "all"


async def test_it_says_that_lost_answers_were_waited_for() -> None:
    pause, _ = _pause(0)
    begun = asyncio.create_task(pause.begin(restart=False, within_s=0.01))
    await asyncio.sleep(0)
    pause.lost()
    with pytest.raises(Unavailable, match="lost answers could come back still after"):
        await begun


def _pause(running: int) -> tuple[Pause, Any]:
    requests = SimpleNamespace(waiting=_Line(), running={number: object() for number in range(running)})
    return Pause(cast(Admission, requests), lambda: None, release=lambda request: None, make=cast(Any, None)), requests
