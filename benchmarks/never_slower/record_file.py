"""results.json of a run: what was measured where, and whether another run may go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench.results import RESULTS
from benchmarks.never_slower.cells import LoadTurn
from services.model_files.folder import one_line
from speculation.errors import ConfigurationError, spelled
from speculation.files import write_whole

FORMAT = 1
KIND = "never-slower"
_SAME_PLACE = ("commit", "processor", "cores", "gpus", "threads")
# What may differ: a run may go on with more repeats or another part of the grid.
_FREE = ("command", "repeats", "on", "prompt_counts")
# Of the router, which a record does not have: it is passed on. Those of older versions may have them.
PASSWORDS = {"learning_redis_url", "learning_redis_password"}

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
    before, after = _fields(earlier["settings"]), _fields(now["settings"])
    apart = [
        f"{key} was {spelled(before.get(key))} and is {spelled(after.get(key))}"
        for key in dict.fromkeys((*after, *before))
        if key.partition(".")[0] not in _FREE and before.get(key) != after.get(key)
    ]
    apart += [
        f"{key} was {spelled(earlier['environment'].get(key))} and is {spelled(now['environment'].get(key))}"
        for key in _SAME_PLACE
        if earlier["environment"].get(key) != now["environment"].get(key)
    ]
    if apart:
        raise ConfigurationError(f"--resume: the earlier run is not of the same kind: {'; '.join(apart)}", about="--resume")


def _fields(settings: Record, section: str = "") -> dict[str, Any]:
    """The fields of a record's settings by their whole names, without passwords."""
    found = dict[str, Any]()
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _fields(value, f"{section}{key}.")
        elif key not in PASSWORDS:
            found[f"{section}{key}"] = value
    return found
