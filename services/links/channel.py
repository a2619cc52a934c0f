"""Options of gRPC channels and servers: message sizes, keepalive, TLS."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from services.links.config import TlsFiles

Options = list[tuple[str, int]]


def client_options(max_bytes: int) -> Options:
    """Channel options: message size, and pings that notice a dead peer within 15 seconds."""
    return [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def server_options(max_bytes: int) -> Options:
    """Server options: sizes of messages and metadata, pings, and permission for the clients' pings.

    The server's own pings end the streams of clients whose machine is gone; their sessions would otherwise stay for ever.
    """
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.max_metadata_size", 16 << 10),
        # Two servers on one port would silently share its calls; without reuse the second one fails to bind.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def make_server(
    max_bytes: int,
    *,
    max_concurrent: int | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """A server without services; ``max_bytes`` limits the size of a message."""
    return grpc.aio.server(
        interceptors=list(interceptors),
        options=server_options(max_bytes),
        maximum_concurrent_rpcs=max_concurrent,
        compression=grpc.Compression.NoCompression,
    )


def bind(server: grpc.aio.Server, address: str, tls: TlsFiles | None = None) -> int:
    """Bind to "host:port" (port 0: any) and return the port.

    Raises:
        RuntimeError: the address is taken, or belongs to no interface of this machine.
    """
    if tls is None:
        return server.add_insecure_port(address)
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
