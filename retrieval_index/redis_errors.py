"""What Redis' client raises, as our errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from speculation.errors import ConfigurationError, Unavailable


@contextmanager
def speaking(origin: str) -> Iterator[None]:
    """Speak to the Redis at ``origin`` (its URL without a password) during the block.

    Raises:
        Unavailable: it cannot be reached or refuses.
        ConfigurationError: an option of the URL is unknown.
    """
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise Unavailable(f"{origin} refuses the user or the password: {error}") from error
    except redis.exceptions.RedisError as error:
        raise Unavailable(f"{origin}: {error}") from error
    except TypeError as error:
        # redis-py reads the options of the URL only when it connects.
        raise ConfigurationError(f"an option of the URL is unknown ({error})", field=origin) from error
