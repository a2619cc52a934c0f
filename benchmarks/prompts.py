"""Reads prompts: Spec-Bench's ``question.jsonl``, HumanEval's, or plain text."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

Prompt = tuple[str, str]


def read_prompts(path: Path, per_group: int) -> list[Prompt]:
    """(group, text) of the first ``per_group`` prompts of every group, first turns only.

    Raises:
        ValueError: a line is not what it should be; names it.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        group, text = _read_line(path, number, line)
        groups[group].append(text)
    return [(group, text) for group, texts in groups.items() for text in texts[:per_group]]


def _read_line(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return "text", line
    try:
        entry = json.loads(line)
        if "turns" in entry:
            return str(entry["category"]), str(entry["turns"][0])
        return "humaneval", str(entry["prompt"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path}:{number}: neither a Spec-Bench nor a HumanEval line ({error!r})") from error
