"""The keys that are valid now. A keys file is read again when it changes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from services.access.key_records import MOST_BYTES, KeyRecord, hash_key, parse_keys, plain_record, read_keys
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Seconds between looks at the file.
_LOOK_S = 1.0
_Stamp = tuple[int, int, int] | None


class KeyRing:
    """Finds the record of a key.

    Args:
        hashes: SHA-256 of keys without limits, in hex.
        file: a keys file; None: there is none.
        clock: seconds, never going back.

    Attributes:
        tell_reload: called from another thread after the file has been read again, with how that ended (ok, refused) and the
            number of valid keys.

    Raises:
        ConfigurationError: the file is wrong. Once running, a wrong file is logged, and the old keys stay. They stay, too,
            while it cannot be read, which is tried again every second.
    """

    def __init__(
        self, hashes: Iterable[str] = (), file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plain = {each: plain_record(each) for each in hashes}
        self._file = file
        self._clock = clock
        self._looked_at = clock()
        self._reading: threading.Thread | None = None
        # The last try to read it failed.
        self._unread = False
        self.tell_reload: Callable[[str, int], None] = _say_nothing
        self._stamp = self._now_stamped()
        self._records = self._plain if file is None else self._with(read_keys(file))

    @property
    def open(self) -> bool:
        """Whether calls need no key."""
        return self._file is None and not self._plain

    def find(self, key: str) -> KeyRecord | None:
        """The record of ``key``; None: it is unknown.

        It is looked up by its hash, so that the time that this takes says nothing about the key.
        """
        self._follow()
        return self._records.get(hash_key(key))

    def settle(self) -> None:
        """Wait until a changed file that has been noticed is read."""
        if self._reading is not None:
            self._reading.join()

    def _with(self, records: Iterable[KeyRecord]) -> dict[str, KeyRecord]:
        return {**self._plain, **{record.hash: record for record in records}}

    def _now_stamped(self) -> _Stamp:
        if self._file is None:
            return None
        try:
            return _stamp_of(self._file.stat())
        except OSError:
            return None

    def _follow(self) -> None:
        if self._file is None or self._clock() - self._looked_at < _LOOK_S:
            return
        self._looked_at = self._clock()
        stamp = self._now_stamped()
        if stamp == self._stamp or (self._reading is not None and self._reading.is_alive()):
            return
        # A file of thousands of keys takes seconds to read, in which whoever asks is answered by the old keys.
        reading = threading.Thread(target=self._read, args=(self._file,), name="keys", daemon=True)
        try:
            reading.start()
        except RuntimeError as error:
            self._not_read(self._file, str(error))
        else:
            self._reading = reading

    def _read(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                stamp = _stamp_of(os.fstat(opened.fileno()))
                content = opened.read(MOST_BYTES + 1)
        except OSError as error:
            self._not_read(file, error.strerror or str(error))
            return
        # A verdict about what was read, which stands until the file changes.
        self._stamp, self._unread = stamp, False
        try:
            self._records = self._with(parse_keys(content, file))
        except ConfigurationError as error:
            log.error("the keys stay as they were: %s", error)
            self.tell_reload("refused", len(self._records))
        else:
            log.warning("%s has changed: %d keys are valid", file, len(self._records))
            self.tell_reload("ok", len(self._records))

    def _not_read(self, file: Path, why: str) -> None:
        if not self._unread:
            log.error("%s has changed and cannot be read (%s): the keys stay as they were until it can", file, why)
        self._unread = True


def _stamp_of(found: os.stat_result) -> _Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _say_nothing(outcome: str, keys: int) -> None:
    pass
