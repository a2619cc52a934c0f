"""The two files of a batch, line by line, as OpenAI's batches have them: requests, and what became of each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from services.api.http.json_body import parse_object
from speculation.errors import ConfigurationError, InvalidArgument

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_FIELDS = {"custom_id", "method", "url", "body"}
_MOST_OF_ID = 512
_DONE = 200
NAMED = "batch_req_"
_BEGINS = f'{{"id":"{NAMED}'.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """A line of the first file.

    Attributes:
        custom_id: by which its answer is found.
    """

    custom_id: str
    path: str
    body: Mapping[str, Any]


def read_requests(file: Path) -> list[BatchRequest]:
    """All of them, in their order.

    Raises:
        ConfigurationError: a line is none; names it.
    """
    found: dict[str, BatchRequest] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                request = _read(parse_object(line))
            except InvalidArgument as error:
                raise ConfigurationError(f"{place}: {error}") from error
            if request.custom_id in found:
                raise ConfigurationError(f"{place}: custom_id is {request.custom_id}: must be another one than before")
            found[request.custom_id] = request
    if not found:
        raise ConfigurationError(f"{file}: no requests are there")
    return list(found.values())


def _read(line: dict[str, Any]) -> BatchRequest:
    if unknown := sorted(line.keys() - _FIELDS):
        raise InvalidArgument(unknown[0], line[unknown[0]], f"unset: a line has {', '.join(sorted(_FIELDS))}")
    name, path, body = line.get("custom_id"), line.get("url"), line.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_OF_ID:
        raise InvalidArgument("custom_id", name, f"a text of 1 to {_MOST_OF_ID} characters")
    if line.get("method") != "POST":
        raise InvalidArgument("method", line.get("method"), "POST")
    if path not in PATHS:
        raise InvalidArgument("url", path, f"one of {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise InvalidArgument("body", body, "an object")
    for field in ("stream", "background"):
        if body.get(field):
            raise InvalidArgument(f"body.{field}", body[field], "false or unset: answers are written whole")
    return BatchRequest(custom_id=name, path=path, body=body)


class AnswersFile:
    """The second file, which has a line for each request that is through, as soon as it is.

    Args:
        resume: keep the answers that are there, and leave out other lines: refusals, and what a run that was cut off has
            written in part.

    Attributes:
        answered: what it has answers to from an earlier run.
        empty: nothing is in it.

    Raises:
        ConfigurationError: it is there already.
    """

    def __init__(self, file: Path, *, resume: bool) -> None:
        kept: dict[str, str] = {}
        if resume and file.exists():
            kept = _answered(file)
            beside = file.with_name(f"{file.name}.part")
            beside.write_text("".join(kept.values()), encoding="utf-8")
            beside.replace(file)
        elif file.exists() and not (file.is_file() and file.stat().st_size == 0):
            # An empty one is what a run leaves that ended before its first answer.
            raise ConfigurationError(
                "is there already; --resume keeps its answers and asks for the others", field=file, verb=""
            )
        self.answered = frozenset(kept)
        self.empty = not kept
        self._file: TextIO = file.open("a", encoding="utf-8")

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line; it is there even if this process ends at once."""
        self.empty = False
        self._file.write(_spelt(line))
        self._file.flush()

    def close(self) -> None:
        """Nothing more is written; the disk has it."""
        os.fsync(self._file.fileno())
        self._file.close()


def _answered(file: Path) -> dict[str, str]:
    """The lines with answers, by what they answer."""
    found = {}
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.endswith(b"\n") and _BEGINS.startswith(raw[: len(_BEGINS)]):
                # It was cut off.
                continue
            try:
                line = json.loads(raw)
                response = line["response"]
                if response is not None and response["status_code"] == _DONE:
                    found[str(line["custom_id"])] = raw.decode()
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigurationError(f"{file}, line {number}: no answer of a batch; name another file") from error
    return found


def _spelt(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
