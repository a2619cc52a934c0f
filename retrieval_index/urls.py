"""Redis URLs, as they may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_password(url: str) -> str:
    """A URL as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = f"{parts.username or ''}:***@"
    return parts._replace(netloc=user + parts.netloc.rpartition("@")[2]).geturl()
