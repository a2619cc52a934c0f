"""Where the HTTP server listens, by the settings."""

from __future__ import annotations

import pytest

from cluster.entry.public import how_to_try
from cluster.settings import component_configs
from cluster.settings.config import load
from services.api.config import HttpConfig
from services.api.sockets import check_http
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


def made(*flags: str) -> HttpConfig | None:
    return component_configs.http_config(load(flags=list(flags), environ={}))


def test_where_it_listens() -> None:
    usual = made()
    assert usual is not None and (usual.host, usual.port, usual.padding) == ("127.0.0.1", 8000, 256)
    assert made("server.http_port=null") is None
    # Whoever leaves gRPC's port to the machine wants no fixed one beside it.
    free, fixed = made("server.port=0"), made("server.port=0", "server.http_port=8123")
    assert free is not None and free.port == 0
    assert fixed is not None and fixed.port == 8123
    named = made("server.http_hosts=[api.example]", "server.http_padding=64", "server.max_concurrent_requests=5")
    assert named is not None and (named.hosts, named.padding) == (("api.example",), 64)
    assert named.public.max_concurrent_requests == 5


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["server.http_port=70000"], ("server.http_port", "'70000'")),
        (["server.http_padding=3"], ("server.http_padding", "'3'")),
        (["server.port=7000", "server.http_port=7000"], ("server.http_port", 7000)),
    ],
)
def test_what_is_refused(flags: list[str], refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal):
        made(*flags)


def test_other_machines_need_keys() -> None:
    config = made("server.host=0.0.0.0", "server.port=0")
    assert config is not None
    with refuses(ConfigurationError, field="server.host", value="0.0.0.0"):
        check_http(config)


def test_the_line_to_try() -> None:
    told = how_to_try("http://127.0.0.1:8000", needs_key=False, page=True)
    assert told.endswith("Page for browsers: http://127.0.0.1:8000/")
    assert "http://127.0.0.1:8000/v1/chat/completions" in told and "Bearer" not in told
    told = how_to_try("http://127.0.0.1:8000", needs_key=True, page=False)
    assert "Authorization: Bearer KEY" in told and "browsers" not in told
