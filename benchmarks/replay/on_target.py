"""Replays recorded answers with the model that wrote them: its passes compute what a recording lacks, such as windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.bench.records import Request
from benchmarks.papers.engine import PaperEngine, RowDrafting, differs_at
from benchmarks.replay.replay import Replayed, Trace
from speculation.errors import ConfigurationError
from speculation.types import SamplingParams


def replay_on_target(
    engine: PaperEngine, traces: Iterable[Trace], sources: Sequence[str], max_nodes: int, index: Path | None
) -> Replayed:
    """Decode all traces one after the other with one new drafter; as ``replay.replay``.

    Raises:
        ConfigurationError: the model answers otherwise, or the index cannot be used.
    """
    engine.draft(RowDrafting(sources=tuple(sources), nodes=max_nodes, config=engine.config, index=index))
    result = Replayed()
    for number, trace in enumerate(traces):
        request = Request(id=str(number), task=trace.task, prompt=trace.prompt, seed=0)
        answer = engine.answer(request, SamplingParams(temperature=0, max_tokens=len(trace.output)))
        if (at := differs_at(answer.tokens, trace.output)) is not None:
            raise ConfigurationError(
                f"its greedy answer to trace {number + 1} is another one from token {at} on; name the model that wrote it",
                about="--model",
            )
        result.count(trace.task, len(answer.arrivals), len(trace.output))
        result.nodes += sum(answer.drafted_by.values())
    return result
