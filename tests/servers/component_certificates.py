"""Certificates of the components for mutual TLS, in files."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from services.links.tls.component_files import ComponentTls, name_of


def write_certificates(
    folder: Path, authority: trustme.CA, role: str, named: str | None = None, **valid: datetime
) -> ComponentTls:
    """Write what the component in ``role`` needs, with a new key.

    Args:
        named: the role that the certificate names instead.
        valid: ``not_before`` and ``not_after``.
    """
    issued = authority.issue_cert(name_of(named or role), **valid)
    files = ComponentTls(
        role=role, certificate=folder / f"{role}.pem", key=folder / f"{role}.key", ca=folder / "authority.pem"
    )
    files.key.write_bytes(issued.private_key_pem.bytes())
    files.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(files.ca))
    return files


def tls_flags(folder: Path) -> list[str]:
    """Settings that name the files which ``write_certificates`` has written into ``folder``."""
    files = {"certificate": "{role}.pem", "key": "{role}.key", "ca": "authority.pem"}
    return [f"cluster.tls.{setting}={folder}/{name}" for setting, name in files.items()]
