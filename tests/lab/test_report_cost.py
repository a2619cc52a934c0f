"""What a report costs: every prompt is asked in all ways by turns, and answers that differ are noticed."""

from __future__ import annotations

import pytest

from lab.report_cost import AGAIN, ASKED, NONE, SOURCES, TREES, measure

pytestmark = pytest.mark.exhaustive


def test_each_prompt_is_asked_in_all_ways() -> None:
    asked: list[tuple[str, str]] = []

    def ask(prompt: str, kind: str) -> tuple[float, tuple[int, ...]]:
        asked.append((prompt, kind))
        return (2.0 if kind == SOURCES else 1.0), (1, 2)

    found = measure(ask, ["a", "b"], minutes=0)
    assert found == {NONE: [1.0, 1.0], AGAIN: [1.0, 1.0], SOURCES: [2.0, 2.0], TREES: [1.0, 1.0]}
    # Once each to warm up.
    assert asked[: len(ASKED)] == [("a", kind) for kind in ASKED]
    assert sorted(asked[len(ASKED) :]) == sorted((prompt, kind) for prompt in "ab" for kind in ASKED)


def test_a_report_that_changes_a_token_is_noticed() -> None:
    with pytest.raises(ValueError, match="differ: b"):
        measure(lambda prompt, kind: (1.0, (1, 2) if (prompt, kind) != ("b", TREES) else (1, 3)), ["a", "b"], minutes=0)
