"""The headers of a call that the router's rules may ask for."""

from __future__ import annotations

from collections.abc import Iterable

# They prove who somebody is; a rule asks for the tenant or the key's name instead.
SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")


def told_headers(given: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Headers, or a gRPC call's metadata, by names in lower case, but for secrets and bytes. Repeated ones are joined."""
    found: dict[str, str] = {}
    for name, value in given or ():
        key = name.lower()
        if key not in SECRET_HEADERS and isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found
