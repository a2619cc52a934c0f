"""Records of API keys, as a keys file holds them: a YAML list of mappings."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from services.machine.list_file import ListFile
from speculation.errors import ConfigurationError, spelled
from speculation.sources import STRATEGIES

_PREFIX = "outrider_"


def hash_key(key: str) -> str:
    """SHA-256 of an API key in hex, as written in a configuration.

    A fast hash is safe for random keys, such as those of ``new_key``; not for words that somebody has made up.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A random key of 256 bits, with a prefix by which scanners of leaked secrets know it."""
    return _PREFIX + secrets.token_urlsafe(32)


# ``observe``: to see the figures of all requests together, from which much could be told of another tenant's single request.
# ``admin``: to change what is served, for everybody.
SCOPES = ("generate", "forget", "observe", "admin")
USUAL_SCOPES = ("generate", "forget")
# Hex digits of its hash that name a key, and its tenant, where the record does not.
_SHORT = 16
# The fields that a new record may get.
KEY_HELP = (
    "requests_per_minute, tokens_per_minute, max_concurrent, max_tokens, weight, strategies: [...], expires: 2030-01-31"
)
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@:-]{1,128}")
KEYS_FILE = ListFile(setting="server.keys_file", most_bytes=16 << 20, holds="a list of keys (outrider new-key prints one)")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """One API key. Limits that are None do not exist.

    Attributes:
        hash: SHA-256 of the key in hex.
        id: what audit log and errors call the key.
        tenant: whose requests they are: keys of one tenant share caches and a place in the queue.
        scopes: what the key may do, of ``SCOPES``; ``USUAL_SCOPES`` where the record does not say.
        requests_per_minute, tokens_per_minute: averages; a burst may use a whole minute's worth at once.
        max_concurrent: most requests at once.
        max_tokens: most tokens of one answer.
        weight: share of the verifier's time when it is short: a tenant of weight 2 gets twice that of one of weight 1.
        strategies: the strategies that a request may name; None: all.
        expires: when the key ceases to be valid; None: never.
    """

    hash: str
    id: str
    tenant: str
    scopes: frozenset[str] = frozenset(USUAL_SCOPES)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_tokens: int | None = None
    weight: float = 1.0
    strategies: frozenset[str] | None = None
    expires: datetime | None = None


def plain_record(key_hash: str) -> KeyRecord:
    """The record of a key of which only the hash is known: without limits, and a tenant of its own."""
    return KeyRecord(hash=key_hash, id=key_hash[:_SHORT], tenant=key_hash[:_SHORT])


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The records in a keys file.

    Raises:
        ConfigurationError: it cannot be read, or a record is wrong; names file, record and field.
    """
    return parse_keys(KEYS_FILE.read(path), path)


def parse_keys(content: bytes, path: Path) -> tuple[KeyRecord, ...]:
    """The records in the content of a keys file.

    Args:
        path: of the file, for the error.

    Raises:
        ConfigurationError: a record is wrong; names file, record and field.
    """
    entries = KEYS_FILE.entries(content, path)
    records = tuple(_record(entry, f"{path}, key {number}") for number, entry in enumerate(entries, 1))
    for name in ("hash", "id"):
        seen: set[str] = set()
        for record in records:
            if (value := getattr(record, name)) in seen:
                raise ConfigurationError(f"two keys have the {name} {value}", field=path)
            seen.add(value)
    return records


def _record(entry: object, where: str) -> KeyRecord:
    if not isinstance(entry, dict):
        raise ConfigurationError(field=where, value=f"{spelled(entry)[:80]!r}", allowed="a mapping")
    known = [each.name for each in fields(KeyRecord)]
    for name in entry:
        if name not in known:
            raise ConfigurationError(f"{where} has the unknown field {name!r}; known: {', '.join(known)}", about=where)
    key_hash = entry.get("hash")
    if not (isinstance(key_hash, str) and _HASH.fullmatch(key_hash)):
        _refuse(where, "hash", key_hash, "64 hex digits (outrider hash-key prints them)")
    given = {name: value for name, value in entry.items() if value is not None}
    checked = {name: _CHECKS[name](value, name, where) for name, value in given.items() if name in _CHECKS}
    short = str(key_hash)[:_SHORT]
    return KeyRecord(**{"hash": str(key_hash), "id": short, "tenant": short, **checked})


def _refuse(where: str, name: str, value: object, allowed: str) -> None:
    raise ConfigurationError(place=where, field=name, value=f"{spelled(value)[:80]!r}", allowed=allowed)


def check_name(value: object, name: str, where: str) -> str:
    """A name of a key or a tenant.

    Raises:
        ConfigurationError: it is none.
    """
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        _refuse(where, name, value, "1 to 128 of the characters A-Z a-z 0-9 . _ @ : -")
    return str(value)


def _count(value: object, name: str, where: str) -> int:
    if not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**53):
        _refuse(where, name, value, "a whole number of at least 1")
    return int(str(value))


def _weight(value: object, name: str, where: str) -> float:
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    if not (whole and math.isfinite(float(str(value))) and 0.01 <= float(str(value)) <= 100):
        _refuse(where, name, value, "a number from 0.01 to 100")
    return float(str(value))


def _names(value: object, name: str, where: str) -> frozenset[str]:
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        _refuse(where, name, value, "a list of names")
    return frozenset(value if isinstance(value, list) else ())


def _scopes(value: object, name: str, where: str) -> frozenset[str]:
    named = _names(value, name, where)
    if unknown := sorted(named - set(SCOPES)):
        _refuse(where, name, ", ".join(unknown), f"of {', '.join(SCOPES)}")
    return named


def _strategies(value: object, name: str, where: str) -> frozenset[str]:
    named = _names(value, name, where)
    if unknown := sorted(named - set(STRATEGIES)):
        _refuse(where, name, ", ".join(unknown), f"of {', '.join(sorted(STRATEGIES))}")
    return named


def _expires(value: object, name: str, where: str) -> datetime:
    moment = value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if isinstance(value, date) and not isinstance(value, datetime):
        moment = datetime(value.year, value.month, value.day)
    if not isinstance(moment, datetime):
        _refuse(where, name, value, "a date, such as 2030-01-31 or 2030-01-31T12:00:00Z")
        raise AssertionError
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_CHECKS: Mapping[str, Any] = {
    "id": check_name,
    "tenant": check_name,
    "scopes": _scopes,
    "requests_per_minute": _count,
    "tokens_per_minute": _count,
    "max_concurrent": _count,
    "max_tokens": _count,
    "weight": _weight,
    "strategies": _strategies,
    "expires": _expires,
}
