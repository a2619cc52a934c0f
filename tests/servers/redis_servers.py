"""Real servers of Redis's protocol for tests: the embedded one, and Debian's where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from retrieval_index.embedded import embedded_redis
from tests.running.ports import free_port

KINDS = ("embedded", "redis-server")


def until_it_answers(client: redis.Redis) -> None:
    """Wait for a server that is just starting."""
    for _ in range(100):
        try:
            client.ping()
            return
        except redis.exceptions.ConnectionError:
            time.sleep(0.05)


@contextmanager
def server(kind: str, folder: Path) -> Iterator[str]:
    """A server that asks for a password; gives its URL."""
    if kind == "embedded":
        with embedded_redis() as url:
            yield url
        return
    port = free_port()
    url = f"redis://:secret@127.0.0.1:{port}"
    with started(folder, url, "--port", str(port), "--requirepass", "secret"):
        yield url


@contextmanager
def started(folder: Path, url: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Debian's server with these options, until the block ends; skips where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    command = [program, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(url) as client:
            until_it_answers(client)
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def with_user(folder: Path, name: str, keys: str, commands: Iterable[str]) -> Iterator[dict[str, str]]:
    """An embedded Redis: the URL of its default user, and of one who may use some commands on some keys alone."""
    with server("embedded", folder) as url:
        with redis.Redis.from_url(url) as admin:
            until_it_answers(admin)
            rules = ["on", ">words", "resetkeys", f"~{keys}", "-@all", *(f"+{each}" for each in commands)]
            admin.execute_command("ACL", "SETUSER", name, *rules)
        yield {"admin": url, "own": f"redis://{name}:words@" + url.rpartition("@")[2]}
