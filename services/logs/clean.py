"""Other people's texts in logs: none can pass for a line of ours, and none can control a terminal.

They are cleaned where a record is made. So whoever logs need not think of it, nor any handler, a library's own included.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

from typing_extensions import override

from services.logs.printable import escaped

_INDENT = "    "


class CleanRecord(logging.LogRecord):
    """A record whose message is one line of printable characters."""

    @override
    def getMessage(self) -> str:  # logging's name
        """The message with its values."""
        return escaped(super().getMessage())


def clean_logs() -> None:
    """Clean all that this process logs from now on: messages as above, and tracebacks line by line, each line indented."""
    if isinstance(logging.makeLogRecord({}), CleanRecord):
        return
    # Ray has one, too, which adds what its own handlers read.
    earlier = logging.getLogRecordFactory()

    def make(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = earlier(*arguments, **keywords)
        record.__class__ = CleanRecord
        # Formatters take both as they are, where they are set.
        if record.exc_info and (error := record.exc_info[1]) is not None:
            record.exc_text = _indented("".join(traceback.format_exception(error)))
        if record.stack_info:
            record.stack_info = _indented(record.stack_info)
        return record

    logging.setLogRecordFactory(make)


def _indented(text: str) -> str:
    return "\n".join(_INDENT + escaped(line) for line in text.splitlines())
