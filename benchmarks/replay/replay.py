"""``outrider replay``: runs drafters against recorded answers, without a model.

The recording replaces the target: a drafted node is accepted if the recording continues with its token, as in greedy
decoding. So a drafting idea can be tried in seconds. A recording lacks what else a forward pass returns (the likeliest
tokens after rejected nodes, what follows a window's columns), so sources that learn from it do worse here; ``on_target`` has
the model compute it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from benchmarks.bench.results import TRACES, read_recorded
from benchmarks.bench.tables import Table
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.retrieval.config import RetrievalConfig
from services.retrieval.service import RetrievalService
from speculation.errors import ConfigurationError
from speculation.messages import CloseSession, Draft, DraftFailure
from speculation.replay import AnswerReplay
from speculation.types import EMPTY_TREE, TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A recorded answer."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    task: str


@dataclass(slots=True)
class Replayed:
    """What a set of sources would have achieved with a budget.

    Attributes:
        by_task: (passes, tokens) by task.
    """

    passes: int = 0
    tokens: int = 0
    nodes: int = 0
    drafting_s: float = 0.0
    by_task: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Tokens per pass."""
        return self.tokens / self.passes if self.passes else 0.0

    def count(self, task: str, passes: int, tokens: int) -> None:
        """Add an answer."""
        self.passes += passes
        self.tokens += tokens
        before = self.by_task.get(task, (0, 0))
        self.by_task[task] = (before[0] + passes, before[1] + tokens)


def read_traces(path: Path) -> list[Trace]:
    """Recorded answers from a jsonl file with ``prompt_ids`` and ``output_ids`` in every line, or from a bench folder.

    Raises:
        ConfigurationError: the file cannot be read or holds no trace, or a line is malformed; names the line.
    """
    file = path / TRACES if path.is_dir() else path
    return read_recorded(file, _read_line, what="trace", made_by=f"outrider bench records {TRACES}")


def _read_line(file: Path, number: int, line: str) -> Trace:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not JSON ({error})", field=f"{file}:{number}") from error
    if isinstance(entry, dict):
        prompt, output = entry.get("prompt_ids"), entry.get("output_ids")
        if _ids(prompt) and _ids(output):
            return Trace(prompt=tuple(prompt), output=tuple(output), task=str(entry.get("task", "text")))
    raise ConfigurationError(
        'not a trace ({"prompt_ids": [token ids], "output_ids": [token ids]})', field=f"{file}:{number}"
    )


def _ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**32 for token in value)


def replay(
    traces: Iterable[Trace], sources: Sequence[str], max_nodes: int, config: DrafterConfig, index: Path | None = None
) -> Replayed:
    """Decode all traces one after the other with one new drafter, as one tenant.

    Args:
        index: folder of a retrieval index to look up in.

    Raises:
        ConfigurationError: the drafter refuses, or the index cannot be used.
    """
    return asyncio.run(_replay(traces, sources, max_nodes, config, index))


async def _replay(
    traces: Iterable[Trace], sources: Sequence[str], max_nodes: int, config: DrafterConfig, index: Path | None
) -> Replayed:
    retrieval = None
    if index is not None:
        retrieval = RetrievalService(RetrievalConfig(index=index))
        await retrieval.start()
    drafter = DrafterService(config, retrieval)
    result = Replayed()
    for number, trace in enumerate(traces):
        await _replay_one(drafter, str(number), trace, sources, max_nodes, result)
    return result


async def _replay_one(
    drafter: DrafterService, name: str, trace: Trace, sources: Sequence[str], max_nodes: int, result: Replayed
) -> None:
    answer = AnswerReplay(name, (*trace.prompt, *trace.output), len(trace.prompt), max_nodes)
    await _draft(drafter, name, drafter.open(answer.opening(sources=tuple(sources), tenant="")), result)
    # As in serving, the pass over the prompt gives the first token; it waits for no draft.
    report, passes = answer.accept(EMPTY_TREE), 1
    while not answer.over:
        tree = await _draft(drafter, name, drafter.step(report), result)
        result.nodes += len(tree)
        report = answer.accept(tree)
        passes += 1
    drafter.close(CloseSession(session_id=name))
    result.count(trace.task, passes, len(trace.output))


async def _draft(
    drafter: DrafterService, name: str, called: Coroutine[Any, Any, Draft | DraftFailure | None], result: Replayed
) -> TokenTree:
    """The tree that answers a call.

    Raises:
        ConfigurationError: the drafter cannot draft.
    """
    start = time.perf_counter()
    draft = await called
    result.drafting_s += time.perf_counter() - start
    if isinstance(draft, DraftFailure):
        raise ConfigurationError(f"cannot draft: {draft.reason}")
    if draft is None:
        draft = await anext(drafter.further(name))
    return draft.tree


def table(results: dict[tuple[str, int], Replayed]) -> Table:
    """Tokens per pass of every strategy and budget, overall and by task."""
    tasks = list(dict.fromkeys(task for result in results.values() for task in result.by_task))
    rows = []
    for (strategy, budget), result in results.items():
        by_task = [result.by_task[task][1] / result.by_task[task][0] for task in tasks]
        rows.append(
            (
                strategy,
                str(budget),
                f"{result.tau:.2f}",
                *(f"{tau:.2f}" for tau in by_task),
                f"{result.nodes / result.passes:.1f}",
                f"{1e6 * result.drafting_s / result.passes:.0f}" if result.drafting_s else "–",
                f"{result.tokens / result.drafting_s:,.0f}" if result.drafting_s else "–",
            )
        )
    return Table(
        title="Replay: tokens per pass",
        columns=("strategy", "budget", "all", *tasks, "nodes/pass", "drafting us/pass", "tok/s"),
        rows=tuple(rows),
    )
