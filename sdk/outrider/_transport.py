"""Addresses, credentials and retry rules that both clients share.

Retries are by hand: gRPC's own do not know how long a server asks to wait, nor that an answer that has begun goes on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import grpc

from outrider._addresses import host_of, is_loopback
from outrider.errors import REQUEST_ID, InvalidArgument, OutriderError, ResourceExhausted, Unavailable

Metadata = tuple[tuple[str, str], ...]

_URL = re.compile("https?://", re.IGNORECASE)
MAX_BYTES = 4 << 20
# Characters of a wrong value in an error.
_SHOWN = 80
Options = list[tuple[str, int | str]]
OPTIONS: Options = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    # A server that hangs while it answers is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Else only two of these pings would be sent, and then one a minute; and those of another kind, which are sent while data
    # flow and hold these back, would wait for a minute.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # A new client is a new connection: the old one may hang, and a port may belong to several servers.
    ("grpc.use_local_subchannel_pool", 1),
    # Calls go to all addresses of a name in turn, and around one that does not answer.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # One that died is back within seconds; gRPC alone would look again after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]


def options_for(address: str) -> Options:
    """The options of a channel to ``address``: no proxy leads to loopback, though gRPC would take one.

    Raises:
        InvalidArgument: the address is a URL, which gRPC would take for a host's name.
    """
    if _URL.match(address):
        allowed = "HOST:PORT, the port that of gRPC (50051 unless told otherwise), without http:// or https://"
        raise InvalidArgument(
            f"address is {address}: must be {allowed}; tls (--tls) speaks TLS", "address", address, allowed
        )
    return [*OPTIONS, ("grpc.enable_http_proxy", 0)] if is_loopback(host_of(address)) else OPTIONS


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call that failed before its first token is tried again.

    Only where another try can help (the server unreachable, stopping or full), and never once a token has come: a half-told
    answer is not told twice. The delay doubles with each try and is drawn between half and one and a half of that; where
    the server says how long to wait (RetryInfo), not less.

    Attributes:
        attempts: tries in all.
        first_delay_s: seconds before the second try.
        most_delay_s: longest wait that the server may ask for; beyond it, the call fails at once.
    """

    attempts: int = 3
    first_delay_s: float = 0.5
    most_delay_s: float = 60.0

    def delay_before(self, attempt: int, error: OutriderError) -> float | None:
        """Seconds to wait before try number ``attempt`` (2 is the first retry); None: give up."""
        if attempt > self.attempts or not isinstance(error, Unavailable | ResourceExhausted):
            return None
        wait: float = self.first_delay_s * 2 ** (attempt - 2) * random.uniform(0.5, 1.5)
        asked = error.retry_after_s or 0.0
        return max(wait, asked) if asked <= self.most_delay_s else None


def metadata(api_key: str | None) -> Metadata:
    """The caller's credentials as call metadata."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def named(request_id: str | None, traceparent: str | None) -> Metadata:
    """What a request is called, and the trace that it belongs to, as call metadata.

    Raises:
        InvalidArgument: they are none, or nothing that metadata can hold.
    """
    if request_id is not None and not (
        isinstance(request_id, str) and 1 <= len(request_id) <= 128 and _printable(request_id)
    ):
        raise wrong("request_id", request_id, "1 to 128 printable ASCII characters")
    if traceparent is not None and not (isinstance(traceparent, str) and _printable(traceparent)):
        raise wrong("traceparent", traceparent, "printable ASCII characters, as in W3C Trace Context")
    given = ((REQUEST_ID, request_id), ("traceparent", traceparent))
    return tuple((key, value) for key, value in given if value is not None)


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def wrong(name: str, value: object, allowed: str) -> InvalidArgument:
    """The error that refuses a value, of which it shows the beginning."""
    try:
        shown = repr(value)
    except ValueError:
        # Python does not write it.
        shown = "a number of thousands of digits"
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
    return InvalidArgument(f"{name} is {shown}: must be {allowed}", name, shown, allowed)


def tls_credentials(root_certificates: bytes | None) -> grpc.ChannelCredentials:
    """For a server that speaks TLS; None: the system's own roots."""
    return grpc.ssl_channel_credentials(root_certificates)
