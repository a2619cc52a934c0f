"""The benchmark of models that are left out: its arithmetic, and that services which answer differently are noticed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from lab.left_out_cost import AGAIN, WITH, WITHOUT, AnswerCost, CostRatio, compare, measure

pytestmark = pytest.mark.exhaustive

ANSWER = AnswerCost(
    tokens=(1, 2), cpu_s=1.0, wall_s=2.0, waited_s=0.0, passes=10, used=False, rows=20, stream_rows=0.0, observed=0
)  # fmt: skip


class Fixed:
    """A service whose answers cost so much."""

    def __init__(self, cpu_s: float, tokens: tuple[int, ...] = (1, 2)) -> None:
        self.prompts: list[str] = []
        self._answer = replace(ANSWER, cpu_s=cpu_s, tokens=tokens)

    async def answer(self, prompt: str, tokens: int, strategy: str) -> AnswerCost:
        self.prompts.append(prompt)
        return self._answer


def measured(services: dict[str, Fixed], minutes: float = 0.0) -> dict[str, list[AnswerCost]]:
    return asyncio.run(measure(services, ["a", "b"], 2, "blend", minutes))  # type: ignore[arg-type]


def test_answers_are_compared_in_pairs_and_apart() -> None:
    without = [replace(ANSWER, cpu_s=cost) for cost in (1.0, 2.0, 4.0)]
    with_it = [replace(each, cpu_s=1.1 * each.cpu_s, passes=11) for each in without]
    with_it[0] = replace(with_it[0], cpu_s=3.0, used=True)
    found = compare(with_it, without)
    assert found["all, per answer"].count == 3 and found["all, per answer"].whole == pytest.approx((3.0 + 6.6) / 7.0)
    assert found["left out, per answer"].median == pytest.approx(1.1)
    assert found["left out, per pass"].median == pytest.approx(1.0)
    assert (found["drafting, per answer"].count, found["drafting, per answer"].median) == (1, 3.0)
    assert "drafting, per answer" not in compare(without, without)


def test_the_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    numbers = random.Random(5)
    held = 0
    for _ in range(400):
        found = CostRatio.of([(numbers.lognormvariate(0.0, 0.3), 1.0) for _ in range(41)])
        assert found.low <= found.median <= found.high
        held += found.low <= 1.0 <= found.high
    assert 0.92 <= held / 400 <= 0.99


def test_services_take_turns_over_all_prompts() -> None:
    services = {name: Fixed(1.0) for name in (WITHOUT, AGAIN, WITH)}
    answers = measured(services, minutes=0.0005)
    counts = {len(several) for several in answers.values()}
    assert len(counts) == 1 and counts.pop() > 1
    assert services[WITH].prompts[:2] == ["a", "b"] and services[WITH].prompts == services[AGAIN].prompts


def test_services_that_answer_differently_end_the_run() -> None:
    with pytest.raises(SystemExit, match="differ"):
        measured({WITHOUT: Fixed(1.0), WITH: Fixed(1.0, tokens=(1, 3))})
