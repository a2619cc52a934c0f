"""How the components write their logs: lines for people, or one JSON object a line for machines. To stderr.

Neither holds prompts, answers or keys: nothing logs them. The text of an unexpected error may quote them, so JSON keeps only
the error's type and place. What others wrote, such as a peer's reason, stands in both without control characters.
"""

from __future__ import annotations

import json
import logging
import os
import re
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

from typing_extensions import override

from cluster.settings.operating import LoggingSettings
from services.logs.clean import clean_logs
from services.logs.names import UsersName
from services.logs.printable import escaped
from speculation.errors import InvalidArgument, OutriderError

# A request as ``log_name`` names it: the user's id, what tells it from others so called, how often it has moved; its trace.
_REQUEST = re.compile(r"(?P<id>.{1,128})\.[0-9a-f]{8}(\.\d+)?( \(trace (?P<trace>[!-~]+)\))?", re.DOTALL)
# A drafter puts the number of its connection before a session's name.
_CONNECTION = re.compile(r"\d+/")
_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-.*")
# Errors whose text comes from the system or from libraries that compute, not from those that read what users send.
_OF_THE_SYSTEM = (OSError, MemoryError, RuntimeError)


def quiet_libraries() -> None:
    """Keep the progress bars and advice of libraries out of what this process prints; before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")


def start_logging(settings: LoggingSettings, stream: TextIO | None = None) -> None:
    """Have this process log as the settings say, in place of whatever was set up before.

    Args:
        stream: where to; None: stderr.
    """
    clean_logs()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        JsonLines() if settings.format == "json" else logging.Formatter("%(asctime)s %(name)s: %(message)s")
    )
    handler.addFilter(_tells_something)
    logging.basicConfig(level=(settings.level or "error").upper(), handlers=[handler], force=True)


def _tells_something(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line. gRPC logs a traceback wherever a client has left before its status was sent."""
    return not (record.name == "grpc._cython.cygrpc" and "ExecuteBatchError" in record.getMessage())


def take_over(*names: str) -> None:
    """Have these libraries' loggers write as everything else does, instead of with handlers of their own."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, and where they are known
    ``request_id`` (the user's), ``request`` (unique), ``trace``, ``error`` and ``traceback``.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said.update(_request(record))
        if record.exc_info is not None and (error := record.exc_info[1]) is not None:
            said.update(_error(error))
        # Whoever decodes the object may show it on a terminal.
        clean = {name: escaped(value) if isinstance(value, str) else value for name, value in said.items()}
        return json.dumps(clean, ensure_ascii=False, default=str)


def _request(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """The request that a record names in one of its arguments."""
    for argument in record.args if isinstance(record.args, tuple) else ():
        if isinstance(argument, UsersName):
            yield "request_id", argument.request_id
            yield from _trace(argument.traceparent)
            return
        if isinstance(argument, str) and (found := _REQUEST.fullmatch(argument)):
            before = _CONNECTION.match(argument) if record.name.startswith("services.drafter") else None
            skipped = before.end() if before else 0
            yield "request_id", found["id"][skipped:]
            yield "request", argument.partition(" (trace ")[0][skipped:]
            yield from _trace(found["trace"])
            return


def _trace(traceparent: str | None) -> Iterator[tuple[str, str]]:
    if traceparent:
        known = _TRACE_ID.fullmatch(traceparent)
        yield "trace", known[1] if known else traceparent


def _error(error: BaseException) -> Iterator[tuple[str, Any]]:
    yield "error", type(error).__name__
    if isinstance(error, (OutriderError, *_OF_THE_SYSTEM)) and not isinstance(error, InvalidArgument):
        yield "error_text", str(error)[:500]
    frames = traceback.extract_tb(error.__traceback__)
    yield "traceback", [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
