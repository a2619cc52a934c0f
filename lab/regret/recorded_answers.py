"""Recorded answers, with the tokens that the target found likeliest at each of their positions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.results import read_recorded
from speculation.errors import ConfigurationError

# The likeliest tokens that are kept of each position: as many as the most curious text source wants.
TOP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAnswer:
    """A prompt, and what the target said.

    Attributes:
        task: the group of the prompt.
        temperature: 0: greedy.
        top_ids: [tokens of the answer, ``TOP``], the target's likeliest ids at each position, likeliest first.
    """

    task: str
    temperature: float
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]


def write_answers(path: Path, answers: Iterable[RecordedAnswer]) -> None:
    """One line of JSON for each, which ``outrider replay`` reads as well."""
    path.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))


def read_answers(path: Path) -> list[RecordedAnswer]:
    """The answers of a file.

    Raises:
        ConfigurationError: it cannot be read, holds no answer, or a line is malformed; names the line.
    """
    return read_recorded(path, _read_line, what="answer", made_by="python -m lab.regret record writes it")


def _read_line(path: Path, number: int, line: str) -> RecordedAnswer:
    try:
        entry: Any = json.loads(line)
        answer = RecordedAnswer(
            task=str(entry["task"]),
            temperature=float(entry["temperature"]),
            prompt_ids=_ids(entry["prompt_ids"]),
            output_ids=_ids(entry["output_ids"]),
            top_ids=tuple(_ids(each) for each in entry["top_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"not a recorded answer ({error!r})", field=f"{path}:{number}") from error
    if len(answer.output_ids) != len(answer.top_ids):
        raise ConfigurationError("output_ids and top_ids differ in length", field=f"{path}:{number}")
    return answer


def _ids(value: Sequence[int]) -> tuple[int, ...]:
    found = tuple(map(int, value))
    if not found or min(found) < 0:
        raise ValueError("token ids are missing or below 0")
    return found
