"""Reads what was recorded, a line of JSON for each answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from speculation.errors import ConfigurationError

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
        raise ConfigurationError(f"cannot read {file}: {error}; {made_by}") from error
    entries = [read_line(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise ConfigurationError(f"{file}: there is no {what} in it")
    return entries
