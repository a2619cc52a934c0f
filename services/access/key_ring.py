"""The keys that are valid now. A keys file is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from services.access.key_hash import hash_key
from services.access.key_records import KeyRecord, plain_record, read_keys
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

    Raises:
        ConfigurationError: the file is wrong. Once running, a wrong file is logged, and the old keys stay.
    """

    def __init__(
        self, hashes: Iterable[str] = (), file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plain = {each: plain_record(each) for each in hashes}
        self._file = file
        self._clock = clock
        self._looked_at = clock()
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

    def _with(self, records: Iterable[KeyRecord]) -> dict[str, KeyRecord]:
        return {**self._plain, **{record.hash: record for record in records}}

    def _now_stamped(self) -> _Stamp:
        if self._file is None:
            return None
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _follow(self) -> None:
        if self._file is None or self._clock() - self._looked_at < _LOOK_S:
            return
        self._looked_at = self._clock()
        stamp = self._now_stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._records = self._with(read_keys(self._file))
        except ConfigurationError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.warning("%s has changed: %d keys are valid", self._file, len(self._records))
