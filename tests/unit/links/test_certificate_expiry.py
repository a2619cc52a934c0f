"""When certificates end is read as the library that made them wrote it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from services.links.tls.component_files import expires_at


@pytest.mark.parametrize("ends", [datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC), datetime(2077, 1, 2, 3, 4, 5, tzinfo=UTC)])
def test_the_end_of_a_certificate(ends: datetime, tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost", not_after=ends)
    file = tmp_path / "chain.pem"
    file.write_bytes(b"text before\n" + b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    assert expires_at(file) == ends.timestamp()


def test_what_is_no_certificate(tmp_path: Path) -> None:
    file = tmp_path / "chain.pem"
    for content in ("", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----", "-----BEGIN CERTIFICATE-----\nMAP/"):
        file.write_text(content)
        with pytest.raises(ValueError):
            expires_at(file)
