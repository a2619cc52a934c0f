"""results.json of a run: what was measured where, and whether another run may go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench.results import RESULTS
from benchmarks.never_slower.cells import LoadTurn
from services.model_files.folder import one_line
from speculation.errors import ConfigurationError
from speculation.files import write_whole

FORMAT = 1
KIND = "never-slower"
_SAME_PLACE = ("commit", "processor", "cores", "gpus", "threads")
# What may differ: a run may go on with more repeats or another part of the grid.
_FREE = ("command", "repeats", "on", "prompt_counts")

Record = Mapping[str, Any]


def write_record(folder: Path, record: Record) -> None:
    """Write results.json, atomically.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / RESULTS, (json.dumps(record, indent=None) + "\n").encode())


def read_record(folder: Path) -> dict[str, Any]:
    """Read what ``write_record`` has written.

    Raises:
        ConfigurationError: there is no such file, or it is of another command or version.
    """
    file = folder / RESULTS
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--resume: cannot read {file}: {one_line(error, file)}; give the --out folder of an earlier run",
            about="--resume",
        ) from error
    if not isinstance(record, dict) or (record.get("kind"), record.get("format")) != (KIND, FORMAT):
        raise ConfigurationError(
            f"--resume: {file} is not a result of this version of outrider bench never-slower", about="--resume"
        )
    return record


def turns_of(record: Record) -> list[LoadTurn]:
    """All recorded turns.

    Raises:
        ConfigurationError: the record is damaged.
    """
    try:
        return [LoadTurn.from_object(entry) for entry in record["turns"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"--resume: the recorded turns are damaged: {error!r}", about="--resume") from error


def check_same(earlier: Record, now: Record) -> None:
    """Raises:
    ConfigurationError: the two records must not be mixed; names all that differs.
    """
    apart = [
        f"{key} was {earlier['settings'].get(key)} and is {value}"
        for key, value in now["settings"].items()
        if key not in _FREE and earlier["settings"].get(key) != value
    ]
    apart += [
        f"{key} was {earlier['environment'].get(key)} and is {now['environment'].get(key)}"
        for key in _SAME_PLACE
        if earlier["environment"].get(key) != now["environment"].get(key)
    ]
    if apart:
        raise ConfigurationError(f"--resume: the earlier run is not of the same kind: {'; '.join(apart)}", about="--resume")
