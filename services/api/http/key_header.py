"""The API key in a request's headers."""

from __future__ import annotations

from starlette.datastructures import Headers

from speculation.errors import Unauthenticated

_SCHEME = "bearer "


def key_of(headers: Headers) -> str | None:
    """The API key, from ``Authorization: Bearer`` or ``X-Api-Key``.

    Raises:
        Unauthenticated: both are there, with different keys.
    """
    given = headers.get("authorization", "")
    bearer = given[len(_SCHEME) :].strip() if given.lower().startswith(_SCHEME) else None
    own = headers.get("x-api-key")
    if bearer and own and bearer != own:
        raise Unauthenticated("authorization and x-api-key carry different API keys: send one of them")
    return bearer or own or None
