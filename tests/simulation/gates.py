"""Keys and an audit log in memory, for the product's own gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from services.access.audit import AuditLog
from services.access.key_records import KeyRecord
from services.access.key_ring import KeyRing


class Keys(KeyRing):
    """A key ring whose file is a list."""

    def __init__(self, records: Sequence[KeyRecord]) -> None:
        super().__init__()
        self._records = {record.hash: record for record in records}

    @property
    @override
    def open(self) -> bool:
        return False

    def revoke(self, key_hash: str) -> None:
        """A key is valid no more."""
        self._records.pop(key_hash, None)

    def replace(self, before: str, record: KeyRecord) -> None:
        """A record takes the place of another one, if that is valid."""
        if self._records.pop(before, None) is not None:
            self._records[record.hash] = record


class Audit(AuditLog):
    """An audit log that is kept.

    Attributes:
        lines: what was written, oldest first.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now=now)
        self.lines: list[dict[str, object]] = []

    @override
    def write(self, **said: object) -> None:
        self.lines.append(said)
