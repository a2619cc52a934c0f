"""What many of these tests share: one service with both public servers for all that only ask it, and versions of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.servers.http_service import HttpService, http_served
from tests.tiny_models.weight_versions import Versions, make_versions


@pytest.fixture(scope="session")
def both_entries(tiny_model: Path) -> Iterator[HttpService]:
    with http_served(tiny_model) as service:
        yield service


@pytest.fixture(scope="session")
def versions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Two versions of a model's weights; their plain answers are made once."""
    return asyncio.run(make_versions(tiny_model, tmp_path_factory.mktemp("versions")))


@pytest.fixture
def admin(servers: dict[str, str]) -> Iterator[redis.Redis]:
    """The default user of a module's Redis server, which is empty at the beginning of a test."""
    with redis.Redis.from_url(servers["admin"]) as client:
        client.flushall()
        yield client


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP clients trust whom a test names. To read all authorities of the machine takes each of them 20 ms."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(Path(__file__).parent))
