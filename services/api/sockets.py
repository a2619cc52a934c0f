"""Where the public servers listen. Errors name the setting."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.access.audit import AuditLog
from services.access.key_records import read_keys
from services.api.config import LOOPBACK, HttpConfig, PublicServerConfig, check_tls
from services.machine.sockets import Address, addresses_of, bind
from speculation.errors import ConfigurationError

_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listener:
    """One of those that listen, and what is said when it cannot; in sentences, host, port and why stand in braces.

    Attributes:
        unknown: the sentence about a host that cannot be resolved.
        refused: how the sentence about an address that cannot be bound begins.
        by_error, otherwise: how it ends, by the system's number of the error.
        flags: of the look-up of a host.
    """

    unknown: str
    refused: str = "cannot listen on {host}:{port} ({why}); "
    by_error: Mapping[int | None, str] = field(default_factory=dict)
    otherwise: str
    flags: int = socket.AI_PASSIVE


_GRPC = _Listener(
    unknown="server.host is {host}: no such host ({why}); use the address of one of this machine's interfaces, "
    "such as 127.0.0.1",
    by_error={
        errno.EADDRNOTAVAIL: "server.host must be the address of one of this machine's interfaces",
        errno.EACCES: "server.port below 1024 needs rights: choose another one",
    },
    otherwise="choose another server.port (0: any free one)",
)
_OTHER_HTTP = "choose another server.http_port (0: any free one, null: no HTTP)"
_HTTP = _Listener(unknown="cannot listen on {host}:{port} ({why}); " + _OTHER_HTTP, otherwise=_OTHER_HTTP)
_OPS = _Listener(
    unknown="server.ops_host is {host}: no such host ({why})",
    refused="cannot listen on {host}:{port} for metrics and health ({why}); ",
    by_error={errno.EADDRNOTAVAIL: "server.ops_host must be the address of one of this machine's"},
    otherwise="choose another server.ops_port (0: any free one, null: none): another service, or another program, "
    "has this one",
    # Without it * is loopback: this listener asks nobody for a key.
    flags=0,
)


def check_server(config: PublicServerConfig, *, first: bool = False) -> None:
    """Check that the gRPC server could be started, without starting it.

    Args:
        first: whether no other router of this service can be there yet, so that even a shared port must be free.

    Raises:
        ConfigurationError: it would be open to other machines without API keys; its address is unknown, taken or not of
            this machine; its port is shared and 0; or its TLS files cannot be used.
    """
    if config.shared and not config.port:
        raise ConfigurationError(
            "routers that share a port must know it; choose one from 1 to 65535, or a single router",
            field="server.port",
            value="0",
        )
    addresses = _found(_GRPC, config.host, config.port)
    if config.host.strip("[]") not in LOOPBACK and not config.asks_for_keys:
        raise ConfigurationError(
            field="server.host",
            value=config.host,
            given=(
                "which others can reach, but there are no api_key_hashes and no keys_file; set server.keys_file "
                "(outrider new-key prints a record) or server.api_key_hashes, or bind to 127.0.0.1"
            ),
        )
    if config.keys_file is not None:
        read_keys(config.keys_file)
    if config.audit_log is not None:
        AuditLog(config.audit_log).close()
    if config.tls is not None:
        check_tls(config.tls)
    # Like the server, accept if any of the host's addresses can be bound.
    _any_bound(_GRPC, config.host, config.port, addresses, shared=config.shared and not first).close()


def check_http(config: HttpConfig, *, first: bool = False) -> None:
    """Check that the HTTP server could be started, without starting it.

    Args:
        first: as in ``check_server``.

    Raises:
        ConfigurationError: see ``check_server``, or the port is taken.
    """
    if config.public.shared and not config.port:
        raise ConfigurationError("several routers share one port; name it", field="server.http_port", value="0")
    # The gRPC server's own port may be taken by that very server.
    check_server(replace(config.public, port=0, shared=False))
    _bound(_HTTP, config.host, config.port, shared=config.public.shared and not first).close()


def listen(config: HttpConfig) -> socket.socket:
    """A socket that listens at the HTTP server's address.

    Raises:
        ConfigurationError: the address is taken or not of this machine.
    """
    listening = _bound(_HTTP, config.host, config.port, shared=config.public.shared)
    try:
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _refusal(_HTTP, config.host, config.port, error) from error
    listening.setblocking(False)
    return listening


def bind_ops(host: str, port: int) -> socket.socket:
    """A socket that is bound to the ops listener's address.

    Raises:
        ConfigurationError: the address is taken, or not one of this machine; says which setting to change.
    """
    return _bound(_OPS, host, port)


def _bound(listener: _Listener, host: str, port: int, *, shared: bool = False) -> socket.socket:
    return _any_bound(listener, host, port, _found(listener, host, port)[:1], shared=shared)


def _found(listener: _Listener, host: str, port: int) -> list[Address]:
    try:
        return addresses_of(host, port, listener.flags)
    except (OSError, UnicodeError) as error:
        raise _refusal(listener, host, port, error, unknown=True) from error


def _any_bound(listener: _Listener, host: str, port: int, addresses: Sequence[Address], *, shared: bool) -> socket.socket:
    """A socket that is bound to the first of the addresses that can be had; the refusal is about the first of all."""
    errors = []
    for family, address in addresses:
        try:
            return bind(family, address, shared=shared)
        except OSError as error:
            errors.append(error)
    # A machine without IPv6 has no such hosts.
    unknown = errors[0].errno == errno.EAFNOSUPPORT
    raise _refusal(listener, host, port, errors[0], unknown=unknown) from errors[0]


def _refusal(listener: _Listener, host: str, port: int, error: Exception, *, unknown: bool = False) -> ConfigurationError:
    ending = listener.by_error.get(getattr(error, "errno", None), listener.otherwise)
    sentence = listener.unknown if unknown else listener.refused + ending
    why = getattr(error, "strerror", None) or error
    return ConfigurationError(sentence.format(host=host, port=port, why=why), about=f"{host}:{port}")
