"""Reads documents from jsonl files, text files and source trees. Duplicates are dropped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculation.errors import ConfigurationError

# Fields of a jsonl line that may hold the text; the first one present is used.
FIELDS = ("text", "content", "answer", "code", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document.

    Attributes:
        digest: SHA-256 of the text, in hexadecimal.
        origin: file, and line for jsonl, where it was found.
    """

    text: str
    digest: str
    origin: str


def read_corpus(paths: Sequence[Path], field: str | None = None) -> list[Document]:
    """All documents without duplicates, in the order of ``paths``; the files of a folder in the order of their names.

    Args:
        field: field of a jsonl line that holds the text; None: the first of ``FIELDS`` that is present.

    Raises:
        ConfigurationError: a named file cannot be read or is not text, a jsonl line has no such field, or there is no
            document at all. Files in a folder that are not text are skipped: source trees hold images and archives.
    """
    found: dict[str, Document] = {}
    for path in paths:
        for origin, text in _read(path, field):
            if text.strip():
                digest = hashlib.sha256(text.encode()).hexdigest()
                found.setdefault(digest, Document(text=text, digest=digest, origin=origin))
    if not found:
        raise ConfigurationError("there is no text in it", field="--corpus", verb="", value=" ".join(map(str, paths)))
    return list(found.values())


def _read(path: Path, field: str | None) -> Iterator[tuple[str, str]]:
    if not path.is_dir():
        _check_text(path)
        yield from _split(path, field)
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if not file.is_file() or file.is_symlink() or any(part.startswith(".") for part in parts):
            continue
        try:
            _check_text(file)
        except ConfigurationError:
            continue
        yield from _split(file, field)


def _check_text(path: Path) -> None:
    """Check that all of a file is text, before anything of it is taken."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                line.decode()
                if b"\0" in line:
                    raise ValueError
    except OSError as error:
        raise ConfigurationError(
            f"cannot be read ({error.strerror or error})", field="--corpus", verb="", value=path
        ) from error
    except ValueError:
        raise ConfigurationError(
            "not UTF-8 text; give .jsonl, text files or folders of them", field="--corpus", verb="", value=path
        ) from None


def _split(path: Path, field: str | None) -> Iterator[tuple[str, str]]:
    if path.suffix != ".jsonl":
        yield str(path), path.read_bytes().decode()
        return
    with path.open("rb") as lines:
        # Lines of bytes: JSON strings may hold other line separators of Unicode.
        for number, line in enumerate(lines, 1):
            text = line.decode().removesuffix("\n")
            if text.strip():
                yield f"{path}:{number}", _field_of(path, number, text, field)


def _field_of(path: Path, number: int, line: str, field: str | None) -> str:
    wanted = FIELDS if field is None else (field,)
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not JSON ({error})", field="--corpus", verb="", value=f"{path}:{number}") from error
    if isinstance(entry, dict):
        for name in wanted:
            if isinstance(entry.get(name), str):
                # A lone surrogate is valid JSON, but no tokenizer accepts it.
                return str(entry[name]).encode(errors="replace").decode()
    has = ", ".join(entry) if isinstance(entry, dict) else "no object"
    raise ConfigurationError(
        f"no text under {' or '.join(wanted)} (it has: {has}); see --field",
        field="--corpus",
        verb="",
        value=f"{path}:{number}",
    )
