"""Notices that a file has changed and has it read again. Until that is done, its earlier content counts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Seconds between looks at the file.
_LOOK_S = 1.0
_Stamp = tuple[int, int, int] | None
Outcome = Literal["ok", "refused"]


class FollowedFile:
    """A file that has been read once, or is just going to be, and is read again when it changes.

    Args:
        what: what it holds, for the log, such as "keys".
        most_bytes: of its content; one byte more is read of a longer one, by which ``take`` knows it.
        take: called from another thread with the new content; says in words what counts now. It raises a
            ``ConfigurationError`` if the content is wrong, and leaves what counts as it was.
        told: called from that thread, after ``take``, with how it ended.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        file: Path,
        what: str,
        most_bytes: int,
        take: Callable[[bytes], str],
        told: Callable[[Outcome], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._what = what
        self._most_bytes = most_bytes
        self._take = take
        self._told = told
        self._clock = clock
        self._looked_at = clock()
        self._reading: threading.Thread | None = None
        # The last try to read it failed.
        self._unread = False
        self._stamp = self._now_stamped()

    def look(self) -> None:
        """Look for a change, at most once a second. It counts as soon as it has been read, not for who looks."""
        if self._clock() - self._looked_at < _LOOK_S:
            return
        self._looked_at = self._clock()
        stamp = self._now_stamped()
        if stamp == self._stamp or (self._reading is not None and self._reading.is_alive()):
            return
        # A file of thousands of entries takes seconds to read.
        reading = threading.Thread(target=self._read, name=self._what, daemon=True)
        try:
            reading.start()
        except RuntimeError as error:
            self._not_read(str(error))
        else:
            self._reading = reading

    def settle(self) -> None:
        """Wait until a change that has been noticed is read."""
        if self._reading is not None:
            self._reading.join()

    def _now_stamped(self) -> _Stamp:
        try:
            return _stamp_of(self._file.stat())
        except OSError:
            return None

    def _read(self) -> None:
        try:
            with self._file.open("rb") as opened:
                stamp = _stamp_of(os.fstat(opened.fileno()))
                content = opened.read(self._most_bytes + 1)
        except OSError as error:
            self._not_read(error.strerror or str(error))
            return
        # A verdict about what was read, which stands until the file changes.
        self._stamp, self._unread = stamp, False
        try:
            counts = self._take(content)
        except ConfigurationError as error:
            log.error("the %s stay as they were: %s", self._what, error)
            self._told("refused")
        else:
            log.warning("%s has changed: %s", self._file, counts)
            self._told("ok")

    def _not_read(self, why: str) -> None:
        if not self._unread:
            log.error(
                "%s has changed and cannot be read (%s): the %s stay as they were until it can", self._file, why, self._what
            )
        self._unread = True


def _stamp_of(found: os.stat_result) -> _Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ino
