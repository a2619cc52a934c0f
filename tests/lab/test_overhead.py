"""The benchmark of what lies around the decoding loop: its arithmetic, and that ways which answer differently are noticed."""

from __future__ import annotations

import asyncio

import pytest

from lab.overhead import DIRECT, GRPC, HTTP, Answered, Way, measure, report

pytestmark = pytest.mark.exhaustive

# Seconds of a request, and of each token after the first.
COSTS = {DIRECT: (0.010, 0.002), GRPC: (0.020, 0.005), HTTP: (0.030, 0.010)}


def way(request_s: float, token_s: float, text: str = "x") -> Way:
    async def answer(tokens: int) -> Answered:
        seconds = request_s + token_s * (tokens - 1)
        return Answered(text=text * tokens, seconds=seconds)

    return answer


def test_differences_are_told_apart_by_request_and_token() -> None:
    found = report(asyncio.run(measure({name: way(*costs) for name, costs in COSTS.items()}, 11, 3, 1.0)))
    medians = {(row, column): round(each.median, 6) for row, columns in found.items() for column, each in columns.items()}
    assert medians[HTTP, "per request"] == 30.0
    assert medians[HTTP, "per token"] == 10.0
    assert medians[f"over {DIRECT}: {GRPC}", "per request"] == 10.0
    assert medians[f"over {DIRECT}: {GRPC}", "per token"] == 3.0


def test_ways_that_answer_differently_end_the_run() -> None:
    ways = {name: way(*costs, text="y" if name == HTTP else "x") for name, costs in COSTS.items()}
    with pytest.raises(SystemExit, match="differ"):
        asyncio.run(measure(ways, 4, 2, 1.0))
