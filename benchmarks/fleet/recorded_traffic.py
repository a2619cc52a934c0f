"""Recorded requests: our own lines of JSON, or a CSV as Azure publishes traces of LLM inference."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.fleet.traffic import Arrival
from services.model_files.folder import one_line
from speculation.errors import ConfigurationError

# Columns of AzureLLMInferenceTrace_*.csv (Splitwise, https://arxiv.org/abs/2311.18677, and later ones).
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LIKE_JSON = '{"at_s": 0.5, "prompt_tokens": 900, "answer_tokens": 200}'
_LIKE_CSV = "2023-11-16 18:15:46.6805900,374,44"


def read_arrivals(path: Path) -> list[Arrival]:
    """The requests of a recording, in the order in which they came.

    A file that ends in ``.csv`` has the columns TIMESTAMP, ContextTokens and GeneratedTokens; others are not read.
    A time is ISO 8601, of UTC where it names no zone, counted from the earliest; each request is a conversation of its own.
    Any other file has a line of JSON for each request, with ``at_s``, ``prompt_tokens``, ``answer_tokens`` and perhaps
    ``conversation`` (a number or text; requests that begin alike have the same; without it each is alone).

    Raises:
        ConfigurationError: the file cannot be read, holds nothing, or a line is malformed; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {one_line(error, path)}", about=path) from error
    found = list((_of_csv if path.suffix.lower() == ".csv" else _of_json)(path, lines))
    if not found:
        raise ConfigurationError("there is no request in it", field=path)
    found.sort()
    return found


def _of_json(path: Path, lines: list[str]) -> Iterator[Arrival]:
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            at_s, prompt, answer = float(entry["at_s"]), entry["prompt_tokens"], entry["answer_tokens"]
            name = json.dumps(entry.get("conversation", ["alone", number]))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigurationError(f"not a request ({_LIKE_JSON}): {error!r}", field=f"{path}:{number}") from error
        if not 0 <= at_s < math.inf:
            raise ConfigurationError(place=f"{path}:{number}", field="at_s", value=at_s, allowed="at least 0")
        _check_counts(f"{path}:{number}", prompt_tokens=prompt, answer_tokens=answer)
        yield Arrival(at_s, names.setdefault(name, len(names)), prompt, answer)


def _of_csv(path: Path, lines: list[str]) -> Iterator[Arrival]:
    rows = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        if missing := [name for name in _COLUMNS if name not in header]:
            raise ConfigurationError(
                f"no column {', '.join(missing)}: the first line must name {','.join(_COLUMNS)}", field=f"{path}:1"
            )
        places = [header.index(name) for name in _COLUMNS]
        timed = [_of_row(f"{path}:{rows.line_num}", row, places, len(header)) for row in rows if row]
    except csv.Error as error:
        raise ConfigurationError(f"{error}", field=f"{path}:{rows.line_num}") from error
    first = min((at for at, _, _ in timed), default=None)
    for conversation, (at, prompt, answer) in enumerate(timed):
        assert first is not None
        yield Arrival((at - first).total_seconds(), conversation, prompt, answer)


def _of_row(where: str, row: list[str], places: list[int], width: int) -> tuple[datetime, int, int]:
    try:
        if len(row) != width:
            raise ValueError(f"{len(row)} fields where the first line has {width}")
        time, prompt, answer = (row[place].strip() for place in places)
        at, counts = datetime.fromisoformat(time), (int(prompt), int(answer))
    except ValueError as error:
        raise ConfigurationError(f"not a request ({_LIKE_CSV}): {error}", field=where) from error
    _check_counts(where, ContextTokens=counts[0], GeneratedTokens=counts[1])
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC), *counts


def _check_counts(where: str, **counts: Any) -> None:
    for name, value in counts.items():
        if type(value) is not int or not 1 <= value <= 2**20:
            raise ConfigurationError(place=where, field=name, value=value, allowed="a whole number from 1 to 1,048,576")
