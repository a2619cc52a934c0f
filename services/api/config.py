"""Settings of the public server, and checks of them that need neither gRPC nor a running server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from services.links.tls.renewed_files import RenewedFiles
from services.links.tls.trial import invalid_now
from services.privacy.config import Privacy
from speculation.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files of a server's certificate chain and its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicServerConfig:
    """The public entry.

    Attributes:
        host: interface to bind to; any but loopback needs API keys.
        port: 0 takes any free port.
        api_key_hashes: SHA-256 of each API key in hex.
        keys_file: records of API keys (services/access/key_records.py); with neither, no keys are asked for, loopback only.
        audit_log: file of the audit log, or "stderr"; None: none.
        tls: certificate and key; None: plain text.
        reflection: lets tools such as grpcurl list the services.
        max_concurrent_requests: most calls at once, health checks aside; further ones are refused.
        max_connections: most connections at once; further ones are closed.
        idle_timeout_s: seconds after which a connection without a call is closed.
        send_timeout_s: seconds that a client may take to make room for a piece of its answer; then its call ends.
        drain_delay_s: seconds between reporting NOT_SERVING and refusing calls when the server stops.
        drain_grace_s: seconds that running calls then have to end.
        privacy: how private answers are sent.
        shared: whether further routers of this service listen on the same port of this machine (SO_REUSEPORT).
    """

    host: str = "127.0.0.1"
    port: int = 50051
    api_key_hashes: tuple[str, ...] = ()
    keys_file: Path | None = None
    audit_log: str | None = None
    tls: TlsFiles | None = None
    reflection: bool = True
    max_concurrent_requests: int = 1024
    max_connections: int = 1024
    idle_timeout_s: float = 600.0
    send_timeout_s: float = 30.0
    drain_delay_s: float = 0.0
    drain_grace_s: float = 300.0
    privacy: Privacy = field(default_factory=Privacy)
    shared: bool = False

    @property
    def asks_for_keys(self) -> bool:
        """Whether calls need an API key."""
        return bool(self.api_key_hashes) or self.keys_file is not None


def check_tls(files: TlsFiles) -> None:
    """Check that certificate and key can be read and match, and that the certificate is valid now.

    Raises:
        ConfigurationError: they cannot be read, do not match, or it is not valid yet or any more.
    """
    for name, file in (("tls_certificate", files.certificate), ("tls_key", files.key)):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"server.{name} is {file}: cannot be read ({error.strerror})") from error
        if b"-----BEGIN " not in content:
            raise ConfigurationError(f"server.{name} is {file}: must be a PEM file")
    try:
        wrong = invalid_now(files.certificate, files.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"server.tls_key is {files.key}: it is not the key of server.tls_certificate, {files.certificate}"
            ) from error
        raise ConfigurationError(
            f"server.tls_certificate is {files.certificate}, server.tls_key is {files.key}: must be a certificate chain and "
            f"its key without password, both in PEM ({error.reason or error})"
        ) from error
    if wrong is not None:
        now = datetime.now(UTC).isoformat(timespec="minutes")
        raise ConfigurationError(f"server.tls_certificate is {files.certificate}: must be valid now, {now} ({wrong})")


def public_files(files: TlsFiles) -> RenewedFiles:
    """Key and certificate chain, read again when they are renewed."""

    def mismatch() -> str | None:
        try:
            check_tls(files)
        except ConfigurationError as error:
            return str(error)
        return None

    return RenewedFiles((files.key, files.certificate), mismatch)


# Interfaces that no other machine reaches, and the names that requests to them have in their Host header.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Most bytes of a request's line and headers.
HEADER_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """The HTTP entry.

    Attributes:
        public: what it shares with the gRPC server: interface, keys, TLS, limits, how it drains. Its port is gRPC's.
        port: 0 takes any free port.
        hosts: names that the Host header may have; empty: those of loopback on loopback, any elsewhere.
        padding: streamed events are filled up to a multiple of so many bytes.
        arrives_s: seconds in which a request's headers, and then its body, must arrive.
    """

    public: PublicServerConfig = field(default_factory=PublicServerConfig)
    port: int = 8000
    hosts: tuple[str, ...] = ()
    padding: int = 256
    arrives_s: float = 30.0

    @property
    def host(self) -> str:
        """The interface, without brackets."""
        return self.public.host.strip("[]")
