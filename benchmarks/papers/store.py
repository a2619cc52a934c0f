"""The folder of a run: what it is a run of, and one JSON file for every unit that is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench.environment import without_passwords
from services.model_files.folder import one_line
from speculation.errors import ConfigurationError, spelled
from speculation.files import write_whole

RUN = "run.json"
_UNITS = "units"


class PaperFolder:
    """Results so far.

    Args:
        identity: all that a result depends on. A folder of another run is refused.
        told: what else the page says of the run, and ``units``, the names of all that is to be measured.

    Raises:
        ConfigurationError: the folder cannot be made or read, or is another run's; names what differs.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        self.folder = folder
        try:
            (folder / _UNITS).mkdir(parents=True, exist_ok=True)
            if (folder / RUN).exists():
                _check(folder, read_object(folder / RUN), identity)
            write_whole(folder / RUN, json.dumps({**identity, **told}, indent=1).encode())
        except OSError as error:
            raise ConfigurationError(f"{error.strerror}", field="--out", value=folder) from error

    def has(self, unit: str) -> bool:
        """Whether a unit is measured."""
        return self._file(unit).exists()

    def write(self, unit: str, result: Mapping[str, Any]) -> None:
        """Keep a unit's result."""
        write_whole(self._file(unit), json.dumps(result).encode())

    def _file(self, unit: str) -> Path:
        return _file(self.folder, unit)


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What a folder is a run of, and the results of those of its units that are measured.

    Raises:
        ConfigurationError: a file is missing or damaged; names it.
    """
    run = read_object(folder / RUN)
    return run, {unit: read_object(file) for unit in run["units"] if (file := _file(folder, unit)).exists()}


def _file(folder: Path, unit: str) -> Path:
    return folder / _UNITS / f"{unit}.json"


def _check(folder: Path, run: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    # As it comes back from the file.
    for key, value in json.loads(json.dumps(identity)).items():
        if run.get(key) != value:
            # Folders of older versions may hold passwords.
            earlier = without_passwords(spelled(run.get(key)))
            raise ConfigurationError(
                f"it holds a run with {key} {earlier}, and this one has {spelled(value)}: name another folder, or go on "
                "with the options of that run",
                field="--out",
                verb="",
                value=folder,
            )


def read_object(file: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        ConfigurationError: it cannot be read; names it.
    """
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigurationError(
            "there is none: name the --out folder of a run of outrider paper", field=str(file)
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"cannot be read ({one_line(error, file)}): delete it, and what it held is measured again", field=str(file)
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError("holds no JSON object: delete it, and what it held is measured again", field=str(file))
    return content
