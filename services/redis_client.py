"""A client of the Redis in which routers share what they keep."""

from __future__ import annotations

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from speculation.errors import ConfigurationError

# Seconds for which a call waits, at most: an answer waits with it.
_TIMEOUT_S = 2.0


def redis_at(url: str, password: str | None, *, field: str) -> redis.asyncio.Redis:
    """A client that has not connected yet. A call is tried twice, for a connection that has meanwhile been closed.

    Args:
        url: with the user, where it needs one.
        password: where the URL holds none.
        field: the setting that holds the URL.

    Raises:
        ConfigurationError: the URL is malformed. It is not shown, since it may contain the password.
    """
    try:
        return redis.asyncio.Redis.from_url(
            url,
            password=password,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError:
        # redis-py's own message may contain the password.
        allowed = "a URL such as redis://USER:PASSWORD@HOST:PORT"
        raise ConfigurationError(field=field, value="hidden", allowed=allowed) from None
