"""Pages of other origins: who may ask is told before a key is asked for, and nobody else may."""

from __future__ import annotations

import pytest

from cluster.settings.config import load
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.unit.api.test_page import served

LISTED = "https://chat.example"
KEYS = PublicServerConfig(port=0, api_key_hashes=(hash_key("k" * 20),))
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


async def test_by_default_no_other_page_may_ask() -> None:
    async with served() as client:
        asked = await client.options("/v1/chat/completions", headers={"origin": LISTED, **ASKED})
        assert asked.status_code == 405
        answer = await client.get("/v1/models", headers={"origin": LISTED})
    assert not [name for each in (asked, answer) for name in each.headers if name.startswith("access-control")]


async def test_a_listed_origin_may_before_its_key_is_asked_for() -> None:
    async with served(HttpConfig(port=0, public=KEYS, cors_origins=(LISTED,))) as client:
        asked = await client.options("/v1/chat/completions", headers={"origin": LISTED, **ASKED})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, LISTED)
        assert {"authorization", "content-type"} <= {*asked.headers["access-control-allow-headers"].lower().split(", ")}
        refused = await client.get("/v1/models", headers={"origin": LISTED})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, LISTED)
        answer = await client.get("/v1/models", headers={"origin": LISTED, "authorization": "Bearer " + "k" * 20})
    assert answer.status_code == 200 and "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers and answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://chat.example.evil", "http://chat.example", "https://evil.example", "null"])
async def test_another_origin_may_not(origin: str) -> None:
    async with served(HttpConfig(port=0, cors_origins=(LISTED,))) as client:
        asked = await client.options("/v1/chat/completions", headers={"origin": origin, **ASKED})
        answer = await client.get("/v1/models", headers={"origin": origin})
    assert asked.status_code == 400
    assert all("access-control-allow-origin" not in each.headers for each in (asked, answer))


async def test_every_origin_may_only_where_it_is_said() -> None:
    async with served(HttpConfig(port=0, public=KEYS, cors_origins=("*",))) as client:
        answer = await client.get("/v1/models", headers={"origin": "https://any.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://*.example", "file://", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with refuses(ConfigurationError, "server.cors_origins.0", repr(origin)):
        load(flags=[f'server.cors_origins=["{origin}"]'], environ={})
