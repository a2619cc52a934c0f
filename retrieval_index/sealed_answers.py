"""An answer as bytes that were never altered, and cannot be read by others where there is a secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from array import array
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# The first byte: what follows is a checksum and the tokens, or a nonce and both encrypted.
_CLEAR, _ENCRYPTED = b"\0", b"\1"
_CHECKSUM, _NONCE = 8, 12
_NOT_OURS = "not an answer that was written here"


class Sealing:
    """Names tenants, and writes and reads answers.

    Token ids are little-endian numbers of 4 bytes. With a secret they are encrypted by AES-256-GCM. Whose answer
    it is is authenticated with it, so that it is never taken for another's.

    Args:
        secret: None: answers are in clear, with a checksum.
    """

    def __init__(self, secret: str | None) -> None:
        self._secret = b"" if secret is None else secret.encode()
        self._cipher = None if secret is None else AESGCM(hashlib.sha256(b"outrider answers" + self._secret).digest())

    def name(self, *parts: str) -> str:
        """A name for what ``parts`` name together, from which they cannot be read: 32 hexadecimal digits."""
        text = b"".join(hashlib.sha256(part.encode()).digest() for part in parts)
        return hmac.new(b"outrider names" + self._secret, text, hashlib.sha256).hexdigest()[:32]

    def seal(self, tokens: Sequence[int], place: str) -> bytes:
        """Token ids below 2^31 as bytes for a place."""
        body = _little(array("i", tokens)).tobytes()
        if self._cipher is None:
            return _CLEAR + _checksum(body, place) + body
        nonce = os.urandom(_NONCE)
        return _ENCRYPTED + nonce + self._cipher.encrypt(nonce, body, place.encode())

    def unseal(self, data: bytes, place: str) -> tuple[int, ...]:
        """The inverse of ``seal``.

        Raises:
            ValueError: it was altered, cut, written for another place or with another secret.
        """
        if self._cipher is None:
            check, body = data[1 : 1 + _CHECKSUM], data[1 + _CHECKSUM :]
            if data[:1] != _CLEAR or not hmac.compare_digest(check, _checksum(body, place)):
                raise ValueError(_NOT_OURS)
        else:
            nonce, sealed = data[1 : 1 + _NONCE], data[1 + _NONCE :]
            try:
                if data[:1] != _ENCRYPTED:
                    raise ValueError(_NOT_OURS)
                body = self._cipher.decrypt(nonce, sealed, place.encode())
            except InvalidTag:
                raise ValueError(_NOT_OURS) from None
        tokens = array("i")
        tokens.frombytes(body)
        if min(tokens := _little(tokens), default=0) < 0:
            raise ValueError("a negative token id")
        return tuple(tokens)


def _checksum(body: bytes, place: str) -> bytes:
    return hashlib.sha256(place.encode() + b"\0" + body).digest()[:_CHECKSUM]


def _little(tokens: array[int]) -> array[int]:
    """The numbers with little-endian bytes, whatever the machine's are."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
