"""The summary in results.json: one JSON object per contestant and concurrency; and what a result says in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench import measures
from benchmarks.bench.records import Cell
from benchmarks.bench.tables import ratio

Summary = dict[str, Any]
Results = Mapping[str, Any]


def summarise(cells: Sequence[Cell], base: str, peers: Sequence[str]) -> list[Summary]:
    """One record for every contestant and concurrency that was measured.

    Args:
        base: plain decoding, over which speed-ups are reported.
        peers: other contestants over which speed-ups are reported.
    """
    measured = {(cell.contestant, cell.concurrency) for cell in cells}
    names = [
        base,
        *(name for name in dict.fromkeys(cell.contestant for cell in cells) if name not in (base, *peers)),
        *peers,
    ]
    levels = sorted({concurrency for _, concurrency in measured})
    return [
        _record(cells, name, concurrency, base, peers)
        for concurrency in levels
        for name in names
        if (name, concurrency) in measured
    ]


def _record(cells: Sequence[Cell], name: str, concurrency: int, base: str, peers: Sequence[str]) -> Summary:
    own = _of(cells, name, concurrency)
    answers = measures.answers_of(own)
    tasks = list(dict.fromkeys(cell.task for cell in own))
    speed_up = {
        other: measures.ratio(own, _of(cells, other, concurrency)).as_object()
        for other in (base, *peers)
        if other != name and _of(cells, other, concurrency)
    }
    return {
        "contestant": name,
        "concurrency": concurrency,
        "requests": len(answers),
        "tokens": measures.tokens_of(own),
        "tokens_per_second": measures.by_repeat(own, measures.speed).as_object(),
        "macro_tokens_per_second": measures.by_repeat(own if concurrency == 1 else (), measures.macro_speed).as_object(),
        "speed_up": speed_up,
        "tau": measures.tau(answers),
        "seconds_saved": measures.seconds_saved(answers),
        "acceptance_per_position": measures.acceptance_per_position(answers),
        "latency": measures.latencies(answers),
        "loop": measures.loop_counts(own),
        "tasks": {task: _task(cells, name, concurrency, task, base) for task in tasks},
    }


def _task(cells: Sequence[Cell], name: str, concurrency: int, task: str, base: str) -> Summary:
    own = [cell for cell in _of(cells, name, concurrency) if cell.task == task]
    others = [cell for cell in _of(cells, base, concurrency) if cell.task == task]
    return {
        "tokens_per_second": measures.by_repeat(own, measures.speed).as_object(),
        "speed_up": measures.ratio(own, others).as_object(),
        "tau": measures.tau(measures.answers_of(own)),
    }


def _of(cells: Sequence[Cell], name: str, concurrency: int) -> list[Cell]:
    return [cell for cell in cells if (cell.contestant, cell.concurrency) == (name, concurrency)]


def verdict_line(results: Results) -> str:
    """Of the least concurrency that was measured. Where the repeats leave a ratio unclear, so does the line."""
    base, levels = results["settings"]["base"], results["settings"]["concurrency"]
    records = [
        record
        for record in results["summary"]
        if record["concurrency"] == min(levels) and record["contestant"] not in results["settings"]["peers"]
    ]
    drafting = [record for record in records if base in record["speed_up"] and record["speed_up"][base]["values"]]
    parts = []
    if drafting:
        best = max(drafting, key=lambda record: float(record["speed_up"][base]["median"]))
        parts.append(f"{best['contestant']} is {ratio(best['speed_up'][base])} of plain decoding's speed")
        tasks = {task: entry["speed_up"] for task, entry in best["tasks"].items() if entry["speed_up"]["values"]}
        if len(tasks) > 1:
            worst = min(tasks, key=lambda task: float(tasks[task]["median"]))
            parts.append(f"its worst group, {worst.replace('_', ' ')}: {ratio(tasks[worst])}")
    return "; ".join([*parts, _tokens(results)]) + "."


def _tokens(results: Results) -> str:
    # Other programs' arithmetic may differ in near ties.
    checks = [
        check
        for check in results["lossless"]["checks"]
        if check["against"] == "plain" and check["contestant"] not in results["settings"]["peers"]
    ]
    if not checks:
        return "no answer was compared"
    wrong = sum(check["answers"] - check["equal"] for check in checks)
    answers = sum(check["answers"] for check in checks)
    return (
        f"NO: {wrong} of {answers} answers differ from plain decoding"
        if wrong
        else f"all {answers} answers equal plain decoding's"
    )
