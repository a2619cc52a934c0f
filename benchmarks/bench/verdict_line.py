"""What a result says, in one line: the fastest strategy, its worst group of prompts, and whether every answer is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.bench.tables import ratio

Results = Mapping[str, Any]


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
