"""results.json: the measurements, the environment, and everything needed to repeat them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.bench.records import Cell, Request, TimedAnswer
from services.model_files.folder import one_line
from speculation.errors import ConfigurationError

FORMAT = 2
RESULTS = "results.json"
TRACES = "traces.jsonl"


def cells_as_objects(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Every measurement with the times of its answers, without text and tokens."""
    return [
        {
            "contestant": cell.contestant,
            "task": cell.task,
            "concurrency": cell.concurrency,
            "repeat": cell.repeat,
            "wall_s": cell.outcome.wall_s,
            "answers": [
                {"tokens": len(answer.tokens), "ttft_s": answer.arrivals[0][0], "total_s": answer.total_s}
                for answer in cell.outcome.answers
            ],
        }
        for cell in cells
    ]


def cumulative_tokens(answers: Sequence[TimedAnswer]) -> list[float]:
    """Tokens after 1, 2, ... steps, averaged over requests; an ended answer keeps its length (SPECTRA, figure 6)."""
    longest = max((len(answer.arrivals) for answer in answers), default=0)
    sums = [0.0] * longest
    for answer in answers:
        so_far = 0
        for step in range(longest):
            so_far += answer.arrivals[step][1] if step < len(answer.arrivals) else 0
            sums[step] += so_far
    return [value / len(answers) for value in sums]


def write_traces(
    path: Path, requests: Sequence[Request], answers: Mapping[str, tuple[int, ...]], runs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Record prompts and answers as token ids, for ``outrider replay``, and with their passes, for the page at ``/``.

    Args:
        answers: by request id.
        runs: as ``saved_run.as_saved`` has them, by request id.
    """
    with path.open("w") as file:
        for request in requests:
            if request.id in answers:
                line: dict[str, Any] = {
                    "task": request.task,
                    "prompt_ids": request.prompt,
                    "output_ids": answers[request.id],
                }
                if request.id in runs:
                    line["run"] = {**runs[request.id], "messages": [{"role": "user", "content": request.turn}]}
                file.write(json.dumps(line) + "\n")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write results.json; infinities and NaN become null."""
    path.write_text(json.dumps(_finite(results), indent=1) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """Read a results.json, given as file or by its folder.

    Raises:
        ConfigurationError: the file cannot be read, or has another format.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        results = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"cannot read {file}: {one_line(error, file)}; give the --out folder of an outrider bench run", about=file
        ) from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ConfigurationError(f"{file} is not a result of this version of outrider bench (format {FORMAT})", about=file)
    return results


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_Entry = TypeVar("_Entry")


def read_recorded(file: Path, read_line: Callable[[Path, int, str], _Entry], *, what: str, made_by: str) -> list[_Entry]:
    """The entries of a file, one for each line that is not blank.

    Args:
        read_line: reads a line, given the file and the line's number for its errors.
        what: a name for an entry; ``made_by``: says what writes such files.

    Raises:
        ConfigurationError: the file cannot be read or holds no entry; or what ``read_line`` raises.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {file}: {one_line(error, file)}; {made_by}", about=file) from error
    entries = [read_line(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise ConfigurationError(f"there is no {what} in it", field=file)
    return entries
