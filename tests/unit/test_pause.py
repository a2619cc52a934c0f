"""What a pause says that did not begin in time."""

from __future__ import annotations

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
    requests = SimpleNamespace(waiting=_Line(), running={number: object() for number in range(running)})
    pause = Pause(cast(Admission, requests), wake=lambda: None, release=lambda request: None, make=cast(Any, None))
    with pytest.raises(Unavailable) as refused:
        await pause.begin(restart=False, within_s=0.01)
    assert str(refused.value).startswith(said)
    assert requests.waiting.turns == "all"
