"""Settings of the public servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cluster.settings.placement import Section
from services.api.config import HttpConfig, PublicServerConfig
from services.privacy.config import Privacy

_SERVER, _HTTP, _PRIVACY = PublicServerConfig(), HttpConfig(), Privacy()

KeyHash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ServerSettings(Section):
    """The public servers, gRPC and HTTP."""

    host: str = Field(_SERVER.host, description="interface to bind to; anything but loopback needs API keys")
    port: int = Field(_SERVER.port, ge=0, le=65535, description="of gRPC; 0: any free one")
    http_port: int | None = Field(
        _HTTP.port, ge=0, le=65535, description="of OpenAI's HTTP API on the same interface; 0: any free one, null: no HTTP"
    )
    http_hosts: tuple[str, ...] = Field(
        (), description="names that requests' Host header may have; none: those of loopback there, any elsewhere"
    )
    http_padding: int = Field(
        _HTTP.padding,
        ge=16,
        le=4096,
        description="streamed events are filled up to a multiple of so many bytes, unless a request says "
        "stream_options.include_obfuscation: false",
    )
    http_arrives_s: float = Field(
        _HTTP.arrives_s,
        gt=0,
        le=3600,
        description="seconds in which the headers of an HTTP request, and then its body, must arrive",
    )
    privacy: Literal["none", "strict"] = Field(
        "none",
        description="strict: all answers are streamed at an even pace, and nothing is drafted for them from others' texts; "
        "none: those that ask for it",
    )
    privacy_tokens: int = Field(_PRIVACY.tokens, ge=1, le=1024, description="in each event of a private answer")
    privacy_interval_s: float = Field(
        _PRIVACY.interval_s,
        gt=0,
        le=60,
        description="seconds between two such events: longer than plain decoding takes for their tokens",
    )
    api_key_hashes: tuple[KeyHash, ...] = Field((), description="SHA-256 of each API key; `outrider hash-key` prints one")
    keys_file: Path | None = Field(
        None,
        description="YAML list of API keys with tenants, scopes and limits; `outrider new-key` prints an entry; read again "
        "when it changes",
    )
    audit_log: str | None = Field(
        None, description="file, or stderr, for one JSON line per request and per refused caller, without their text"
    )
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    reflection: bool = _SERVER.reflection
    max_concurrent_requests: int = Field(
        _SERVER.max_concurrent_requests, ge=1, description="most calls at once; health checks do not count"
    )
    max_connections: int = Field(_SERVER.max_connections, ge=1, description="most connections at once")
    idle_timeout_s: float = Field(
        _SERVER.idle_timeout_s, ge=1, le=86400, description="seconds after which a connection without a call is closed"
    )
    send_timeout_s: float = Field(
        _SERVER.send_timeout_s, gt=0, le=3600, description="seconds after which a client that reads nothing is given up"
    )
    drain_delay_s: float = Field(
        _SERVER.drain_delay_s,
        ge=0,
        le=600,
        description="seconds between NOT_SERVING and refusing calls at the end: more than the period of a balancer's checks",
    )
    drain_grace_s: float = Field(
        _SERVER.drain_grace_s,
        ge=0,
        le=3600,
        description="seconds that running calls then have to end; more than the longest answer takes",
    )
    ops_host: str = Field(
        "127.0.0.1",
        description="interface of the port for those who operate the service; it asks for no key and speaks no TLS, so only "
        "they should reach it",
    )
    ops_port: int | None = Field(
        9464,
        ge=0,
        le=65535,
        description="/metrics, /health and /ready over HTTP; 0: any free port, as it is by default where server.port is 0; "
        "null: none",
    )

    @property
    def http(self) -> int | None:
        """The port of HTTP; 0: any free one, also where gRPC's is left to the machine; None: there is none."""
        unset = "http_port" not in self.model_fields_set
        return 0 if unset and self.port == 0 else self.http_port

    @property
    def ops(self) -> int | None:
        """The port of the ops listener; 0: any free one; None: there is none."""
        unset = "ops_port" not in self.model_fields_set
        return 0 if unset and self.port == 0 else self.ops_port
