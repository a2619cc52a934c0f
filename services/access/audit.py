"""The audit log: one JSON line for each request and each refused caller. It holds no text of requests or answers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TextIO

from typing_extensions import override

from services.logs.printable import escaped
from services.logs.sparse import SparseLog
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

STDERR = "stderr"
# Seconds between complaints that lines cannot be written.
_COMPLAIN_S = 60.0
_MOST_CHARACTERS = 256


class _ToFile(WatchedFileHandler):
    @override
    def handleError(self, record: logging.LogRecord) -> None:
        raise


class _ToStderr(logging.StreamHandler[TextIO]):
    @override
    def handleError(self, record: logging.LogRecord) -> None:
        raise


class AuditLog:
    """Writes lines to a file, to stderr or nowhere. Levels of logging do not silence it.

    A file that is moved away or deleted is opened again. A line that cannot be written is lost, and the log says so: a full
    disk stops no request.

    Args:
        where: a file's path, "stderr", or None: nowhere.
        now: seconds since 1970.

    Raises:
        ConfigurationError: the file cannot be opened.
    """

    def __init__(self, where: str | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._complaints = SparseLog(log, every_s=_COMPLAIN_S)
        self._handler: logging.Handler | None = None
        if where == STDERR:
            self._handler = _ToStderr()
        elif where is not None:
            try:
                self._handler = _ToFile(Path(where).expanduser(), encoding="utf-8")
            except OSError as error:
                raise ConfigurationError(
                    f"cannot be written ({error.strerror}); name a file, or stderr", field="server.audit_log", value=where
                ) from error

    def write(self, **said: object) -> None:
        """Write one line: the time, and ``said``. Strings are shortened, and hold nothing that a terminal would obey."""
        if self._handler is None:
            return
        at = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": at, **{name: _shown(value) for name, value in said.items()}})
        try:
            self._handler.handle(logging.makeLogRecord({"msg": line}))
        except (OSError, ValueError) as error:
            self._complaints.error("lost", "a line of the audit log is lost: %s", error)

    def close(self) -> None:
        """Close the file."""
        if isinstance(self._handler, _ToFile):
            self._handler.close()


def _shown(value: object) -> object:
    return escaped(value[:_MOST_CHARACTERS]) if isinstance(value, str) else value
