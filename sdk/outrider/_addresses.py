"""Where a server is: on this machine, or perhaps behind a proxy."""

from __future__ import annotations

import ipaddress
import os

# The environment's proxies that gRPC takes, the first one that is set.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# How gRPC may be told to find a host.
_SCHEMES = ("dns", "ipv4", "ipv6")


def proxy_before(address: str) -> str | None:
    """The environment variable that names a proxy for calls to ``address``; None: they go there directly."""
    if is_loopback(host_of(address)):
        return None
    return next((name for name in _PROXIES if os.environ.get(name)), None)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """The host of an address as gRPC takes them, such as "host:port" or "dns:///host:port"; a local socket is localhost."""
    scheme, _, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return "localhost"
    if scheme in _SCHEMES and not rest.isdecimal():
        address = rest.rpartition("/")[2]
    host, _, port = address.rpartition(":")
    return (host if port.isdecimal() and host else address).strip("[]").lower()


def names_port(address: str) -> bool:
    """Whether an address as ``host_of`` takes it has a port, or the name of one; a local socket needs none."""
    before, _, port = address.rpartition(":")
    named = address.count(":") == 1 and port[:1].isalpha() and before not in _SCHEMES
    return address.startswith(("unix:", "unix-abstract:")) or port.isdecimal() or named
