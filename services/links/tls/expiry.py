"""When a certificate ends, read from its file without a library for certificates."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

_VERSION, _UTC_TIME = 0xA0, 0x17
_PEM_END = "-----END CERTIFICATE-----"


def expires_at(file: Path) -> float:
    """The end of the validity of the first certificate in a PEM file, in seconds since 1970.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate.
    """
    text = file.read_text(encoding="ascii", errors="replace")
    start = text.find("-----BEGIN CERTIFICATE-----")
    der = ssl.PEM_cert_to_DER_cert(text[start : text.index(_PEM_END) + len(_PEM_END)])
    try:
        # Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version?, serial, signature, issuer, validity, ... } ... }
        _, certificate, _ = _element(der)
        _, rest, _ = _element(certificate)
        kind, _, after = _element(rest)
        if kind == _VERSION:
            rest = after
        for _ in ("serial", "signature", "issuer"):
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)
        kind, until, _ = _element(rest)
    except IndexError:
        raise ValueError(f"{file}: not a certificate") from None
    # RFC 5280: two digits of the year are those from 1950 to 2049, as strptime's are of 1969 to 2068; both end in Z.
    moment = datetime.strptime(until.decode("ascii"), "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ")
    return moment.replace(tzinfo=UTC).timestamp()


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """The first element's tag and content, and what follows it."""
    kind, length, at = der[0], der[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(der[2:at])
    if at + length > len(der):
        raise IndexError
    return kind, der[at : at + length], der[at + length :]
