"""A source that reads hidden states of three layers, beside text sources and alone, over both links: the tokens of plain
decoding, and the states of every position that was computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from services.drafter.sessions.model_group import ModelGroup
from services.drafter.sources.interfaces import DraftWanted
from speculation.types import Plan, TokenTree
from tests.drafters.model_source import NAME, SPEC, ModelDouble, register
from tests.lossless.test_strategies import PROMPTS, answers, plain_answers
from tests.running.patience import PATIENCE_S

# Of a model of two layers: both, and what the output layer reads.
LAYERS = (0, 1, -1)


class Gathering(ModelDouble):
    """Its first batch takes until three requests have asked for drafts, so the next one has two at least."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(layers=LAYERS)
        self._asked: set[str] = set()
        self._three_have = threading.Event()
        draft = ModelGroup.draft

        def counted(group: ModelGroup, session_id: str, *wanted: Any) -> Any:
            self._asked.add(session_id)
            if len(self._asked) >= 3:
                self._three_have.set()
            return draft(group, session_id, *wanted)

        monkeypatch.setattr(ModelGroup, "draft", counted)

    @override
    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree]:
        assert self._three_have.wait(PATIENCE_S)
        return super().draft(batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.8, "top_p": 0.9, "seed": 3}, {}], ids=str)
async def test_a_model_source_changes_no_token(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, link: str, sampling: dict[str, object]
) -> None:
    plain = await plain_answers(tiny_model, sampling)
    for sources in ((NAME,), ("suffix", "recycling", NAME)):
        double = register(monkeypatch, Gathering(monkeypatch), replace(SPEC, layers=LAYERS))
        plan = Plan(
            strategy="any", sources=sources, max_nodes=8, observe_top_k=8, observe_layers=LAYERS, observe_prompt=True
        )
        assert await answers(tiny_model, "real", link, plan, sampling, together=True) == plain
        assert max(len(batch) for batch in double.batches) > 1
        assert len(double.masked) == len(PROMPTS)
        assert set(map(len, double.masked.values())) == {0}
        # Three layers of 64 numbers of two bytes.
        assert {len(row) for states in double.states.values() for row in states.values()} == {3 * 64 * 2}
    for broken in ("slow", "failing"):
        double = register(monkeypatch, ModelDouble(layers=LAYERS), replace(SPEC, layers=LAYERS))
        double.delay_s, double.fails_for = (0.05, set()) if broken == "slow" else (0.0, {""})
        assert await answers(tiny_model, "real", link, plan, sampling, together=True) == plain, broken
