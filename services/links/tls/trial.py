"""Tries certificates before anybody connects: a handshake in memory, in which one end checks what the other shows."""

from __future__ import annotations

import ssl
from pathlib import Path

# OpenSSL's codes of a certificate that is not valid yet, and of one that is no longer.
_BY_THE_CLOCK = (9, 10)
_MOST_FLIGHTS = 8


def refusal(certificate: Path, key: Path, ca: Path, *, serving: bool) -> str | None:
    """Why a peer that trusts ``ca`` would refuse a certificate chain, in OpenSSL's words; None: it would not.

    Names in the certificate are not checked.

    Args:
        serving: it is shown by a server, otherwise by a client.

    Raises:
        OSError: the files cannot be read, or are no certificate chain, its key, and certificates.
    """
    error = _handshake(certificate, key, ca, serving=serving)
    return None if error is None else error.verify_message


def invalid_now(certificate: Path, key: Path) -> str | None:
    """Why a server's certificate is not valid by this machine's clock, whoever has signed it; None: it is.

    Raises:
        OSError: as ``refusal``.
    """
    error = _handshake(certificate, key, certificate, serving=True)
    return error.verify_message if error is not None and error.verify_code in _BY_THE_CLOCK else None


def _handshake(certificate: Path, key: Path, ca: Path, *, serving: bool) -> ssl.SSLCertVerificationError | None:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        # An empty password keeps an encrypted key from asking for one on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    checking = client if serving else server
    checking.load_verify_locations(ca)
    # As gRPC does: the authority need not be a root.
    checking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    checking.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    waiting = [server.wrap_bio(to_server, to_client, server_side=True), client.wrap_bio(to_client, to_server)]
    for _ in range(_MOST_FLIGHTS):
        for end in tuple(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error
    return None
