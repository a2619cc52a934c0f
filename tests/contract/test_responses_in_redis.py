"""Responses that are kept in Redis: bounds, seals, several routers, and a Redis that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from cluster.settings import component_configs
from cluster.settings.config import load
from services.api.config import HttpConfig, PublicServerConfig, StoredResponses
from services.api.http.responses.responses_in_redis import COMMANDS, ResponsesInRedis
from services.api.http.responses.stored_responses import StoredResponse
from services.api.http.server import serve_http
from speculation.errors import ConfigurationError, Unavailable
from tests.contract.test_stored_responses import ASKED
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers import redis_servers
from tests.servers.responses import PATH
from tests.servers.scripted_router import ScriptedRouter

pytestmark = pytest.mark.xdist_group("responses_in_redis")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """By kind the URL of its default user, and of one who may do no more than the store needs."""
    with redis_servers.with_user(tmp_path_factory.mktemp("embedded"), "responses", "outrider:responses:*", COMMANDS) as urls:
        yield urls


@asynccontextmanager
async def stored(url: str, **bounds: Any) -> AsyncIterator[ResponsesInRedis]:
    store = ResponsesInRedis(StoredResponses(redis_url=url, **bounds))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def served(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A router of its own, whose responses are in Redis."""
    async with stored(url) as store:
        config = HttpConfig(port=0, public=PublicServerConfig(port=0))
        server = await serve_http(ScriptedRouter("words"), config, store=store)
        try:
            async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
                yield client
        finally:
            await server.stop(0)


def name_of(number: int) -> str:
    return f"resp_{number:048x}"


def names(admin: redis.Redis) -> list[bytes]:
    return list(admin.scan_iter())


def kept(size: int) -> StoredResponse:
    return StoredResponse(response=b"x" * size, context=b'["fox"]')


async def test_what_is_put_is_there_for_its_tenant_alone(servers: dict[str, str], admin: redis.Redis) -> None:
    async with stored(servers["own"]) as store, stored(servers["own"]) as another_router:
        assert await store.put("Ann's team", name_of(1), kept(3))
        assert await another_router.get("Ann's team", name_of(1)) == kept(3)
        assert await store.get("Bob's", name_of(1)) is None
        assert not await store.delete("Bob's", name_of(1))
        await store.forget("Bob's")
        assert await store.put("Bob's", name_of(2), kept(4))
        # No key tells of a tenant, or of what was said.
        assert all(b"Ann" not in key and b"Bob" not in key and b"fox" not in key for key in names(admin))
        for odd in ("", "*", "x" * 100_000, name_of(1) + "\n", "resp_1}:of:resp_2", "resp_é"):
            assert await store.get("Ann's team", odd) is None and not await store.delete("Ann's team", odd)
        await store.forget("Ann's team")
        assert await store.get("Ann's team", name_of(1)) is None and await store.get("Bob's", name_of(2)) == kept(4)
        assert await store.delete("Bob's", name_of(2)) and not await store.delete("Bob's", name_of(2))
        # Nothing is left of them but the counter, which ends by itself.
        assert all(key.endswith(b":bytes") and admin.pttl(key) > 0 and admin.get(key) == b"0" for key in names(admin))


async def test_bounds_hold_for_each_tenant(servers: dict[str, str], admin: redis.Redis) -> None:
    async with stored(servers["own"], most=3, bytes=1 << 16) as store:
        assert await store.put("quiet", name_of(9), kept(10))
        for number in range(5):
            assert await store.put("busy", name_of(number), kept(10))
            await asyncio.sleep(0.002)
        assert [await store.get("busy", name_of(number)) is not None for number in range(5)] == [
            False,
            False,
            True,
            True,
            True,
        ]
        # The same one again takes no second place.
        assert await store.put("busy", name_of(4), kept(20)) and await store.get("busy", name_of(2)) is not None
        # A large one takes the room of its own tenant's.
        assert await store.put("busy", name_of(5), kept(65_470)) and await store.get("busy", name_of(4)) is None
        assert await store.get("busy", name_of(5)) == kept(65_470)
        assert not await store.put("busy", name_of(6), kept(1 << 16))
        assert await store.get("quiet", name_of(9)) == kept(10)
        # What Redis has thrown out itself does not keep others out.
        for key in admin.scan_iter("*:ends"):
            admin.delete(key)
        assert await store.put("busy", name_of(7), kept(65_000)) and await store.get("busy", name_of(7)) is not None


async def test_what_is_too_old_is_gone_and_takes_no_room(servers: dict[str, str], admin: redis.Redis) -> None:
    async with stored(servers["own"], age_s=0.2, bytes=1 << 16) as store, stored(servers["own"], bytes=1 << 16) as longer:
        await longer.put("one", name_of(0), kept(100))
        await store.put("one", name_of(1), kept(60_000))
        await asyncio.sleep(0.3)
        assert await store.get("one", name_of(1)) is None
        await longer.put("one", name_of(2), kept(60_000))
        assert await longer.get("one", name_of(0)) is not None
        assert all(admin.pttl(key) > 0 for key in names(admin))


async def test_what_is_damaged_is_not_there(servers: dict[str, str], admin: redis.Redis) -> None:
    async with stored(servers["own"]) as store:
        await store.put("one", name_of(1), kept(50))
        [key] = admin.scan_iter("*:of:*")
        whole = admin.get(key)
        assert isinstance(whole, bytes)
        for damaged in (b"", whole[:20], whole[:-1], whole[:60] + b"?" + whole[61:]):
            admin.set(key, damaged)
            assert await store.get("one", name_of(1)) is None
        # Whole, but another's.
        admin.set(key.replace(name_of(1).encode(), name_of(2).encode()), whole)
        assert await store.get("one", name_of(2)) is None
        admin.set(key, whole)
        assert await store.get("one", name_of(1)) == kept(50)


async def test_a_conversation_goes_on_at_another_router(servers: dict[str, str], admin: redis.Redis) -> None:
    async with served(servers["own"]) as first, served(servers["own"]) as second:
        begun = (await first.post(PATH, json=ASKED)).json()
        assert begun["store"] is True
        went_on = await second.post(PATH, json={**ASKED, "previous_response_id": begun["id"]})
        assert went_on.status_code == 200
        listed = (await first.get(f"{PATH}/{went_on.json()['id']}/input_items", params={"order": "asc"})).json()["data"]
        assert [item["content"][0]["text"] for item in listed] == ["fox", "words", "fox"]
        assert (await second.delete(f"{PATH}/{begun['id']}")).status_code == 200
        assert (await first.get(f"{PATH}/{begun['id']}")).status_code == 404


async def test_without_redis_answers_are_whole_and_told_not_to_be_stored() -> None:
    async with served(f"redis://127.0.0.1:{free_port()}") as client:
        for store in ({}, {"store": True}):
            answer = await client.post(PATH, json={**ASKED, **store})
            assert (answer.status_code, answer.json()["status"], answer.json()["store"]) == (200, "completed", False)
        streamed = await client.post(PATH, json={**ASKED, "stream": True})
        assert '"store":false' in streamed.text.rsplit("response.completed", 1)[1].replace(" ", "")
        for answer in (
            await client.post(PATH, json={**ASKED, "previous_response_id": name_of(1)}),
            await client.get(f"{PATH}/{name_of(1)}"),
            await client.delete(f"{PATH}/{name_of(1)}"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable"), answer.text
            assert "redis" not in answer.text.lower()


async def test_redis_comes_back(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://:secret@127.0.0.1:{port}"
    options = ("--port", str(port), "--requirepass", "secret")
    async with stored(url) as store:
        for _ in range(2):
            with redis_servers.started(tmp_path, url, *options):
                assert await store.put("one", name_of(1), kept(3)) and await store.get("one", name_of(1)) == kept(3)
            with pytest.raises(Unavailable):
                await store.get("one", name_of(1))
            with pytest.raises(Unavailable):
                await store.forget("one")


def test_the_password_comes_from_the_environment_and_with_a_url() -> None:
    def bounds(*flags: str, **environ: str) -> StoredResponses:
        config = component_configs.http_config(load(flags=list(flags), environ=environ))
        assert config is not None
        return config.responses

    url = "server.stored_responses_redis_url=redis://there"
    secret = {"OUTRIDER_SERVER__STORED_RESPONSES_REDIS_PASSWORD": "words"}
    # Several routers share it.
    assert bounds(url, "router.replicas=2", **secret).most == 10_000
    assert bounds(url, **secret).redis_password == "words" and "words" not in repr(bounds(url, **secret))
    with refuses(ConfigurationError, field="server.stored_responses_redis_password", value="set"):
        bounds(**secret)
    with refuses(ConfigurationError, field="--set", value="server.stored_responses_redis_password"):
        bounds(url, "server.stored_responses_redis_password=words")
    with refuses(ConfigurationError, field="server.stored_responses_redis_url", value="hidden"):
        ResponsesInRedis(StoredResponses(redis_url="http://:words@there"))
