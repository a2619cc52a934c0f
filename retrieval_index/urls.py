"""Redis URLs, as they may be shown: where they lead, and nothing that could be a secret."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_password(url: str) -> str:
    """Scheme, host, port and database of a URL."""
    try:
        parts = urlsplit(url)
        # What is odd about a URL is most often a password that should have been escaped.
        if parts.hostname is None or parts.fragment or "@" in parts.path:
            raise ValueError
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "a Redis URL that cannot be read (are special characters of the password escaped?)"
    user = "***@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}"
