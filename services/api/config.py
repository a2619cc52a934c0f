"""Settings of the public server, and checks of them that need neither gRPC nor a running server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from services.links.tls.renewed_files import RenewedFiles
from services.links.tls.trial import invalid_now
from services.patterns import ORIGIN, SHA256
from services.privacy.config import Privacy
from services.settings import Setting
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
        tls: certificate and key; None: plain text.
        privacy: how private answers are sent.
        shared: whether further routers of this service listen on the same port of this machine (SO_REUSEPORT).
    """

    host: Annotated[str, Setting("interface on which the public servers listen; any but loopback needs API keys")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Setting("port of the gRPC server; 0: any free one", ge=0, le=65535)] = 50051
    api_key_hashes: Annotated[
        tuple[str, ...],
        Setting("SHA-256 of each API key in hex; `outrider hash-key` prints one", pattern=SHA256),
    ] = ()
    keys_file: Annotated[
        Path | None,
        Setting(
            "YAML list of API keys with tenants, scopes and limits, which is read again when it changes; `outrider new-key` "
            "prints an entry"
        ),
    ] = None
    audit_log: Annotated[
        str | None,
        Setting("file, or stderr, for one JSON line per request and per refused caller, without their text; null: none"),
    ] = None
    tls: TlsFiles | None = None
    reflection: Annotated[bool, Setting("whether tools such as grpcurl may list the gRPC services")] = True
    # Seven eighths of them are more than a thousand, which benchmarks send at once from one address.
    max_concurrent_requests: Annotated[
        int,
        Setting(
            "most calls at once, health checks aside; further ones are refused; an address may have seven eighths", ge=1
        ),
    ] = 1280
    max_connections: Annotated[int, Setting("most connections at once; further ones are closed", ge=1)] = 1024
    idle_timeout_s: Annotated[
        float, Setting("seconds after which a connection without a call is closed", ge=1, le=86400)
    ] = 600.0
    max_connection_age_s: Annotated[
        float,
        Setting(
            "seconds, give or take a tenth, after which a connection ends with the calls that are under way on it, so that "
            "clients come to new routers, too",
            ge=1,
            le=86400,
        ),
    ] = 300.0
    send_timeout_s: Annotated[
        float,
        Setting("seconds that a client may take to make room for a piece of its answer; then its call ends", gt=0, le=3600),
    ] = 30.0
    drain_delay_s: Annotated[
        float,
        Setting(
            "seconds between reporting NOT_SERVING and refusing calls when the server stops: more than the period of a load "
            "balancer's checks",
            ge=0,
            le=600,
        ),
    ] = 0.0
    drain_grace_s: Annotated[
        float,
        Setting("seconds that running calls then have to end: more than the longest answer takes", ge=0, le=3600),
    ] = 300.0
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
            raise ConfigurationError(f"cannot be read ({error.strerror})", field=f"server.{name}", value=file) from error
        if b"-----BEGIN " not in content:
            raise ConfigurationError(field=f"server.{name}", value=file, allowed="a PEM file")
    try:
        wrong = invalid_now(files.certificate, files.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"it is not the key of server.tls_certificate, {files.certificate}", field="server.tls_key", value=files.key
            ) from error
        raise ConfigurationError(
            field="server.tls_certificate",
            value=files.certificate,
            given=f"server.tls_key is {files.key}",
            allowed=f"a certificate chain and its key without password, both in PEM ({error.reason or error})",
        ) from error
    if wrong is not None:
        now = datetime.now(UTC).isoformat(timespec="minutes")
        raise ConfigurationError(
            field="server.tls_certificate", value=files.certificate, allowed=f"valid now, {now} ({wrong})"
        )


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
class StoredResponses:
    """How many answers of the Responses API are kept, and for how long."""

    most: Annotated[
        int,
        Setting(
            "most answers of /v1/responses that are kept for previous_response_id: in a router's memory, or in Redis for "
            "each tenant; 0: none. Private ones are never kept, and without Redis none are where there are several routers",
            name="stored_responses",
            ge=0,
        ),
    ] = 10_000
    bytes: Annotated[
        int,
        Setting(
            "most bytes of answers that are kept: in memory, or in Redis for each tenant",
            name="stored_responses_bytes",
            ge=1 << 16,
        ),
    ] = 256 << 20
    age_s: Annotated[
        float, Setting("seconds for which an answer is kept, at most", name="stored_responses_age_s", gt=0, le=90 * 86400)
    ] = 86400.0
    redis_url: Annotated[
        str | None,
        Setting(
            "redis:// or rediss:// URL where answers are kept, for all routers and beyond their end; null: in memory",
            name="stored_responses_redis_url",
        ),
    ] = field(default=None, repr=False)
    redis_password: Annotated[
        str | None,
        Setting(
            "password of that Redis, where the URL holds none; to be set in the environment or a file alone",
            name="stored_responses_redis_password",
            secret=True,
        ),
    ] = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """The HTTP entry.

    Attributes:
        responses: which answers are kept.
        public: what it shares with the gRPC server: interface, keys, TLS, limits, how it drains. Its port is gRPC's.
        port: 0 takes any free port.
    """

    public: PublicServerConfig = field(default_factory=PublicServerConfig)
    port: int = 8000
    hosts: Annotated[
        tuple[str, ...],
        Setting(
            "names that the Host header of HTTP requests may have; none: those of loopback on loopback, any elsewhere",
            name="http_hosts",
        ),
    ] = ()
    padding: Annotated[
        int,
        Setting(
            "streamed HTTP events are filled up to a multiple of so many bytes, unless a request says "
            "stream_options.include_obfuscation: false",
            name="http_padding",
            ge=16,
            le=4096,
        ),
    ] = 256
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Setting(
            "what a chat template does not read (reasoning_effort, verbosity, chat_template_kwargs, earlier thoughts, names "
            "in messages), and what agents and editors always ask for and is not there (built-in tools beside their own, "
            "samplers): ignore leaves it out and names it in the header x-outrider-ignored; refuse refuses the request"
        ),
    ] = "ignore"
    arrives_s: Annotated[
        float,
        Setting(
            "seconds in which the headers of an HTTP request, and then its body, must arrive",
            name="http_arrives_s",
            gt=0,
            le=3600,
        ),
    ] = 30.0

    responses: StoredResponses = field(default_factory=StoredResponses)
    page: Annotated[
        bool,
        Setting(
            "whether the HTTP port has pages for browsers: /, a chat that shows who guessed which token, and /docs, what "
            "each path takes and answers, as /openapi.json says it to programs"
        ),
    ] = True
    cors_origins: Annotated[
        tuple[str, ...],
        Setting(
            "origins, such as https://chat.example, whose pages in browsers may ask the HTTP port, with a key of their own "
            "where it needs one; *: those of every origin, so that without keys any page may use it; none: no other pages",
            pattern=ORIGIN,
        ),
    ] = ()
    metrics: Annotated[
        bool,
        Setting(
            "whether the HTTP port has /metrics, with the numbers of the whole service; where keys are needed, it takes one "
            "with the scope observe"
        ),
    ] = False

    @property
    def host(self) -> str:
        """The interface, without brackets."""
        return self.public.host.strip("[]")
