"""A source that reads hidden states of three layers, beside text sources and alone, over both links: the tokens of plain
decoding, and the states of every position that was computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speculation.types import Plan
from tests.fakes import PLAIN
from tests.lossless.test_strategies import PROMPTS, answers
from tests.model_source import NAME, SPEC, ModelDouble, register

# Of a model of two layers: both, and what the output layer reads.
LAYERS = (0, 1, -1)


@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
async def test_a_model_source_changes_no_token(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, link: str, sampling: dict[str, object]
) -> None:
    plain = await answers(tiny_model, "real", "in_process", PLAIN, sampling, together=False)
    for sources in ((NAME,), ("suffix", "recycling", NAME)):
        double = register(monkeypatch, ModelDouble(layers=LAYERS), replace(SPEC, layers=LAYERS))
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
