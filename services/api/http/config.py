"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.api.config import PublicServerConfig

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
