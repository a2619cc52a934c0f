"""From a file of prompts to what each of its entries asks."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.api.messages import ChatMessage
from services.prompt_files.forms import FilePrompt, prompt_of
from speculation.errors import ConfigurationError


def read_file_prompts(file: Path, option: str = "--prompts") -> Iterator[tuple[str, FilePrompt]]:
    """The entries of a file, each with its place in it.

    ``.jsonl`` and ``.ndjson`` hold a JSON object per line, ``.json`` a list of them, ``.csv`` a row with named columns per
    entry; any other file is text with one prompt per line. ``forms`` has the forms of entries.

    Args:
        option: what names the file on the command line, for errors.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is malformed; names file, line and field.
    """
    text = _read(file, option)
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            entries = _lines(file, text)
        case ".json":
            entries = _list(file, text)
        case ".csv":
            entries = _rows(file, text)
        case _:
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    yield f"{file}:{number}", FilePrompt(task="text", messages=(ChatMessage(role="user", content=line),))
            return
    for where, entry in entries:
        yield where, prompt_of(entry, where)


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot be read ({error.strerror})", field=option, verb="", value=file) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"is not UTF-8 at byte {error.start}", field=option, verb="", value=file) from error


def _lines(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines(), which also cuts where JSON may have a line separator within a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{file}:{number}"
            yield where, _parsed(line, where)


def _list(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    entries = _parsed(text, str(file))
    if not isinstance(entries, list):
        raise ConfigurationError("must hold a list of objects; one object per line makes a .jsonl file", field=str(file))
    for number, entry in enumerate(entries):
        yield f"{file}[{number}]", entry


def _rows(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            yield f"{file}:{rows.line_num}", row
    except csv.Error as error:
        raise ConfigurationError(f"is not CSV ({error})", field=f"{file}:{rows.line_num}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"is not JSON ({error})", field=where) from error
