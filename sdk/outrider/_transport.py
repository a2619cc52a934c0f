"""Addresses, credentials and retry rules that both clients share."""

from __future__ import annotations

import random
from dataclasses import dataclass

import grpc

from outrider.errors import OutriderError, ResourceExhausted, Unavailable

MAX_BYTES = 4 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
]


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call that failed before its first token is tried again.

    Only where another try can help (the server unreachable or full), and never once a token has come: a half-told answer
    is not told twice.
    """

    attempts: int = 3
    first_delay_s: float = 0.2

    def delay_before(self, attempt: int, error: OutriderError) -> float | None:
        """Seconds to wait before try number ``attempt`` (2 is the first retry); None: give up."""
        if attempt > self.attempts or not isinstance(error, Unavailable | ResourceExhausted):
            return None
        wait: float = self.first_delay_s * 2 ** (attempt - 2) * random.uniform(0.5, 1.5)
        return max(wait, error.retry_after_s) if isinstance(error, ResourceExhausted) else wait


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The caller's credentials as call metadata."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def tls_credentials(root_certificates: bytes | None) -> grpc.ChannelCredentials:
    """For a server that speaks TLS; None: the system's own roots."""
    return grpc.ssl_channel_credentials(root_certificates)
