"""Pages of other origins in browsers: which of them may ask this server (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# Of our answers, what scripts may read besides what they always may.
_SHOWN = (
    "retry-after",
    "retry-after-ms",
    "x-outrider-ignored",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
)
# Seconds for which a browser need not ask again whether it may.
_MAX_AGE_S = 600


def for_pages_of(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The application as pages of these origins may ask it, too; "*": those of every origin; none: it as it is.

    A browser's question whether it may is answered before any key is asked for: it brings none. Scripts have to bring keys
    themselves: cookies and the like are never asked for.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_SHOWN,
        max_age=_MAX_AGE_S,
    )
