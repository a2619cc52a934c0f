"""When a certificate ends, read from its file."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509


def expires_at(file: Path) -> float:
    """The end of the validity of the first certificate in a PEM file, in seconds since 1970.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate.
    """
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()
