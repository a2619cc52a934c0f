"""The keys that are valid now. A keys file is read again when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from services.access.key_records import KEYS_FILE, KeyRecord, hash_key, parse_keys, plain_record, read_keys
from services.machine.followed_file import FollowedFile


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
        self.tell_reload: Callable[[str, int], None] = _say_nothing
        self._records = self._plain
        self._followed: FollowedFile | None = None
        if file is not None:
            self._followed = FollowedFile(
                file,
                "keys",
                KEYS_FILE.most_bytes,
                lambda content: self._take(parse_keys(content, file)),
                lambda outcome: self.tell_reload(outcome, len(self._records)),
                clock=clock,
            )
            self._take(read_keys(file))

    @property
    def open(self) -> bool:
        """Whether calls need no key."""
        return self._file is None and not self._plain

    def find(self, key: str) -> KeyRecord | None:
        """The record of ``key``; None: it is unknown.

        It is looked up by its hash, so that the time that this takes says nothing about the key.
        """
        if self._followed is not None:
            self._followed.look()
        return self._records.get(hash_key(key))

    def settle(self) -> None:
        """Wait until a changed file that has been noticed is read."""
        if self._followed is not None:
            self._followed.settle()

    def _take(self, records: Iterable[KeyRecord]) -> str:
        self._records = {**self._plain, **{record.hash: record for record in records}}
        return f"{len(self._records)} keys are valid"


def _say_nothing(outcome: str, keys: int) -> None:
    pass
