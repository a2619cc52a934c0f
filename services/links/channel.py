"""Options of gRPC channels and servers: message sizes, keepalive, TLS."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from services.links.guarded_calls import WholeMessages

Options = list[tuple[str, int]]


# What gRPC's pings need in order to notice a peer that hangs in the time that they promise. It sends two to a peer that it
# has nothing else to say to, and then one a minute; 0 lifts that. And a ping of another kind (it measures bandwidth while
# data flow) holds the next one back until a time limit of its own, which is a minute.
_PINGS = [("grpc.http2.max_pings_without_data", 0), ("grpc.http2.ping_timeout_ms", 10_000)]


# Components talk to each other alone: a proxy that the environment names is the way to elsewhere. gRPC would send even calls
# to loopback through it.
DIRECT: Options = [("grpc.enable_http_proxy", 0)]


def client_options(max_bytes: int) -> Options:
    """Channel options: message size, no proxy, pings that notice a dead peer within 15 seconds, a try to reconnect every 2.

    gRPC's own pauses between tries grow to two minutes, in which a component that is back serves nobody.
    """
    return [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        *DIRECT,
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        *_PINGS,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(max_bytes: int, *, shared: bool = False) -> Options:
    """Server options: sizes of messages and metadata, pings, and permission for the clients' pings.

    The server's own pings end the streams of clients whose machine is gone; their sessions would otherwise stay for ever.
    """
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        *_PINGS,
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.max_metadata_size", 16 << 10),
        # Two servers on one port share its calls; where that is not meant, the second one must fail to bind.
        ("grpc.so_reuseport", int(shared)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def make_server(
    max_bytes: int,
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Sequence[tuple[str, int]] = (),
    shared: bool = False,
) -> grpc.aio.Server:
    """A server without services; ``max_bytes`` limits the size of a message. Messages that are none are refused.

    Args:
        shared: whether others may bind to its port.
    """
    return grpc.aio.server(
        interceptors=[*interceptors, WholeMessages()],
        options=[*server_options(max_bytes, shared=shared), *options],
        compression=grpc.Compression.NoCompression,
    )


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind to "host:port" (port 0: any) and return the port.

    Raises:
        RuntimeError: the address is taken, or belongs to no interface of this machine.
    """
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
