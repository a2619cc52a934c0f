"""Redis URLs without secrets, for messages."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_password(url: str) -> str:
    """Scheme, host, port and database of a URL."""
    try:
        parts = urlsplit(url)
        # An odd URL most often holds a password that was not escaped.
        if parts.hostname is None or parts.fragment or "@" in parts.path:
            raise ValueError
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "a Redis URL that cannot be read (are special characters of the password escaped?)"
    user = "***@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}"
