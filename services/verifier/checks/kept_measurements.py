"""Measurements kept for the next start on the same machine: one file each, named after everything they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from speculation.files import write_whole

log = logging.getLogger(__name__)

Measured = TypeVar("Measured")
# What reading another content than ours raises.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def digest_of(model_path: str) -> str:
    """Hash of the model's config.json; the path itself if there is no such file."""
    file = Path(model_path) / "config.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else model_path


def latest(folder: Path, **about: object) -> Any:
    """The latest measurement whose ``about`` contains these entries; None if there is none."""
    with contextlib.suppress(OSError):
        for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
            with contextlib.suppress(*_DAMAGED):
                content = json.loads(file.read_text())
                if about.items() <= content["about"].items():
                    return content["measured"]
    return None


class Kept:
    """The file of one measurement.

    Args:
        folder: None: nothing is kept.
        about: what the measurement depends on, as JSON, including the version of its format.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        self._about = about
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        self._file = None if folder is None else folder / f"{name}.json"

    def read(self, parse: Callable[[Any], Measured]) -> Measured | None:
        """``parse`` of the kept measurement; None if there is none, or it is damaged."""
        if self._file is None or not self._file.is_file():
            return None
        try:
            content = json.loads(self._file.read_text())
            if content["about"] != self._about:
                raise ValueError("it is of another model, machine or version")
            return parse(content["measured"])
        except (OSError, *_DAMAGED) as error:
            log.warning("cannot use %s, measuring anew: %s", self._file, error)
            return None

    def write(self, measured: object) -> None:
        """Keep ``measured``. A folder that cannot be written to is only logged."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps({"about": self._about, "measured": measured}, indent=1).encode())
        except OSError as error:
            log.warning("cannot keep %s: %s", self._file, error)
