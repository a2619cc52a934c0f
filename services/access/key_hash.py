"""API keys and their hashes. A service stores only the hashes."""

from __future__ import annotations

import hashlib
import secrets

_PREFIX = "outrider_"


def hash_key(key: str) -> str:
    """SHA-256 of an API key in hex, as written in a configuration.

    A fast hash is safe for random keys, such as those of ``new_key``; not for words that somebody has made up.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A random key of 256 bits, with a prefix by which scanners of leaked secrets know it."""
    return _PREFIX + secrets.token_urlsafe(32)
