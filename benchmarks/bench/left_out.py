"""Says under a table of the benchmark which drafts a contestant's answers went without, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_WHY = {
    "share": "others would have lost more than verifier.named_share",
    "deadline": "not there within verifier.named_deadline_s",
    "silent": "its drafter had not answered yet",
    "lost": "its drafter was not connected",
    "failed": "its drafter could not make one",
}


def left_out_lines(contestant: str, loop: Mapping[str, Any]) -> Iterator[str]:
    """A line for each source that did not always draft; none if all did.

    Args:
        loop: as from ``measures.loop_counts``. Results that were written before lack some counts.
    """
    for source, reasons in loop.get("source_choices", {}).items():
        if line := _not_paying(reasons, loop.get("weighed", {}).get(source)):
            yield _of(contestant, source) + line
    for source, counts in loop.get("named", {}).items():
        if counts["answers without"]:
            yield _of(contestant, source) + _undrafted(counts)


def _of(contestant: str, source: str) -> str:
    return f"{contestant}: " if source == contestant else f"{contestant}: {source} "


def _not_paying(reasons: Mapping[str, int], weighed: Mapping[str, float] | None) -> str:
    """What a costly source comes to where drafts need to pay; empty: all answers had it."""
    without, given_up = reasons.get("too_costly", 0), reasons.get("given_up", 0)
    begun = without + reasons.get("trial", 0) + reasons.get("pays", 0)
    parts = []
    if without:
        parts.append(f"left out in {without} of {begun} answers")
    if given_up:
        parts.append(f"given up in {given_up} of {begun}")
    if parts and weighed is not None and (times := weighed.get("times")):
        costs, brings = (100 * weighed[name] / times for name in ("costs", "brings"))
        parts.append(f"costs {costs:.0f} % a step, brings {brings:.0f} %")
    return ", ".join(parts)


def _undrafted(counts: Mapping[str, int]) -> str:
    """The steps of a named strategy that had not all of a source's draft."""
    answers = f"did not always draft in {counts['answers without']} of {counts['answers']} answers"
    why = ", ".join(f"{words} in {counts[name]}" for name, words in _WHY.items() if counts.get(name))
    return f"{answers}: of {counts['steps']} steps, {why}"
