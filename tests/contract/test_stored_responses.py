"""Responses that are kept: for whom, how many, how long; and what becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import outrider
from cluster.entry.public import opened_entry
from cluster.process.observing import Observing
from cluster.settings import component_configs
from cluster.settings.config import load
from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig, StoredResponses
from services.api.http.responses.stored_responses import ResponsesInMemory, StoredResponse
from services.api.http.server import HttpServer, serve_http
from services.privacy.config import Privacy
from tests.servers.openai_types import check_response, response_events_of
from tests.servers.responses import PATH
from tests.servers.scripted_router import ScriptedRouter
from tests.servers.service import tiny_settings

ASKED: dict[str, Any] = {"input": "fox", "max_output_tokens": 5}
KEYS = {name: {"authorization": f"Bearer {name * 20}"} for name in "abc"}


@asynccontextmanager
async def served(
    folder: Path, router: ScriptedRouter | None = None, **config: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, HttpServer]]:
    """A server with three keys: a and b are of one tenant, c is of another."""
    records = [("a", "one", ""), ("b", "one", ""), ("c", "two", "max_concurrent: 1")]
    keys = folder / "keys.yaml"
    keys.write_text("".join(f"- {{hash: {hash_key(n * 20)}, id: {n}, tenant: {t}, {more}}}\n" for n, t, more in records))
    privacy = config.pop("privacy", Privacy())
    public = PublicServerConfig(port=0, keys_file=keys, privacy=privacy)
    audit = str(folder / "audit")
    gate = open_gate((), keys, audit)
    server = await serve_http(router or ScriptedRouter("words"), HttpConfig(port=0, public=public, **config), gate)
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            yield client, server
    finally:
        await server.stop(0)
        gate.close()


async def made(client: httpx2.AsyncClient, key: str = "a", **more: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={**ASKED, **more}, headers=KEYS[key])
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    check_response(found)
    return found


async def error(client: httpx2.AsyncClient, key: str = "a", **more: Any) -> tuple[int, str, str]:
    answer = await client.post(PATH, json={**ASKED, **more}, headers=KEYS[key])
    told = answer.json()["error"]
    return answer.status_code, told["param"], told["code"]


async def test_tenants_are_sealed(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        first = await made(client)
        name, item = first["id"], first["output"][0]["id"]
        paths = [("GET", f"{PATH}/{name}"), ("GET", f"{PATH}/{name}/input_items"), ("POST", f"{PATH}/{name}/cancel")]
        # Keys of one tenant share; for others, what they may not see and what is not there are the same.
        assert (await client.get(paths[0][1], headers=KEYS["b"])).json() == first
        for method, path in (*paths, ("DELETE", paths[0][1])):
            refused = await client.request(method, path, headers=KEYS["c"])
            unknown = await client.request(method, path.replace(name, "resp_" + "0" * 48), headers=KEYS["c"])
            assert refused.status_code == unknown.status_code == 404
            assert refused.json()["error"]["code"] == "response_not_found"
            assert refused.text.replace(name, "") == unknown.text.replace("resp_" + "0" * 48, "")
        previous = (400, "previous_response_id", "previous_response_not_found")
        assert await error(client, "c", previous_response_id=name) == previous
        reference = [{"type": "item_reference", "id": item}]
        assert await error(client, "c", input=reference) == (400, "input[0].id", "item_not_found")
        assert (await made(client, "b", previous_response_id=name))["status"] == "completed"
        assert (await made(client, "b", input=[*reference, {"role": "user", "content": "x"}]))["status"] == "completed"


async def test_what_is_deleted_or_not_stored_is_not_there(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        name = (await made(client))["id"]
        deleted = await client.delete(f"{PATH}/{name}", headers=KEYS["a"])
        assert deleted.json() == {"id": name, "object": "response", "deleted": True}
        unstored = await made(client, store=False)
        assert unstored["store"] is False
        for gone in (name, unstored["id"]):
            assert (await client.get(f"{PATH}/{gone}", headers=KEYS["a"])).status_code == 404
            assert (await client.delete(f"{PATH}/{gone}", headers=KEYS["a"])).status_code == 404
            assert (await error(client, previous_response_id=gone))[1] == "previous_response_id"


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"privacy": Privacy(mode="strict", interval_s=0.01)}, {}),
        ({}, {"privacy": "strict"}),
        ({"responses": StoredResponses(most=0)}, {}),
    ],
)
async def test_private_answers_are_not_stored(tmp_path: Path, config: dict[str, Any], more: dict[str, Any]) -> None:
    async with served(tmp_path, **config) as (client, _):
        answer = await made(client, **more)
        assert answer["store"] is False
        assert (await client.get(f"{PATH}/{answer['id']}", headers=KEYS["a"])).status_code == 404
        assert await error(client, store=True, **more) == (400, "store", "unsupported_value")


async def test_input_items_in_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        first = await made(client, input=[{"role": "user", "content": word} for word in ("a", "b")])
        name = (await made(client, previous_response_id=first["id"], input="c", instructions="not listed"))["id"]

        async def listed(**query: Any) -> dict[str, Any]:
            answer = await client.get(f"{PATH}/{name}/input_items", params=query, headers=KEYS["a"])
            found: dict[str, Any] = answer.json()
            return found

        whole = await listed(order="asc")
        assert [item["content"][0]["text"] for item in whole["data"]] == ["a", "b", "words", "c"]
        assert whole["data"][2]["id"] == first["output"][0]["id"] and whole["has_more"] is False
        assert (await listed())["data"] == whole["data"][::-1]
        page = await listed(limit=1, order="asc", after=whole["data"][0]["id"])
        assert page["data"] == whole["data"][1:2] and page["has_more"] is True
        for field, value in (("limit", 0), ("limit", "x"), ("order", "up"), ("after", "nobody")):
            assert (await listed(**{field: value}))["error"]["param"] == field


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(size: int) -> StoredResponse:
    return StoredResponse(response=b"x" * size, context=b"")


async def test_bounds_of_the_store() -> None:
    clock = Clock()
    store = ResponsesInMemory(StoredResponses(most=4, bytes=1 << 16, age_s=60), clock)
    for index in range(4):
        await store.put("busy", f"r{index}", kept(10))
    await store.put("quiet", "q", kept(10))
    # The busiest tenant makes room, with its oldest.
    assert [await store.get("busy", f"r{index}") is None for index in range(4)] == [True, False, False, False]
    assert await store.get("quiet", "q") == kept(10)
    # One large answer takes the room of its own tenant's.
    await store.put("busy", "large", kept(60_000))
    await store.put("busy", "larger", kept(61_000))
    assert await store.get("busy", "larger") is not None and await store.get("quiet", "q") is not None
    assert await store.get("busy", "large") is None and await store.get("busy", "r3") is None
    await store.put("busy", "too large", kept(1 << 16))
    assert await store.get("busy", "too large") is None and await store.get("busy", "larger") is not None
    clock.now = 59.0
    await store.put("late", "l", kept(10))
    assert await store.delete("quiet", "q") and not await store.delete("quiet", "q")
    clock.now = 61.0
    assert await store.get("busy", "larger") is None and await store.get("late", "l") is not None
    await store.forget("late")
    assert await store.get("late", "l") is None
    await store.put("late", "l", kept(10))
    assert await store.get("late", "l") is not None


async def test_one_who_stores_most_pushes_out_nobody_else() -> None:
    store = ResponsesInMemory(StoredResponses(most=100, bytes=1 << 20, age_s=60))
    for index in range(10):
        await store.put(f"quiet {index}", "q", kept(100))
    for index in range(500):
        await store.put("busy", f"{index}", kept(3000))
    assert all([await store.get(f"quiet {index}", "q") is not None for index in range(10)])
    assert sum([await store.get("busy", f"{index}") is not None for index in range(500)]) == 90


async def test_a_closed_store_is_empty_and_answers() -> None:
    clock = Clock()
    store = ResponsesInMemory(StoredResponses(most=2, bytes=1 << 16, age_s=60), clock)
    for name in ("first", "second"):
        await store.put("t", name, kept(30_000))
    await store.close()
    clock.now = 61.0
    # By requests that are still answered.
    for name in ("third", "fourth"):
        assert await store.put("t", name, kept(30_000))
    assert [await store.get("t", name) is not None for name in ("first", "third", "fourth")] == [False, True, True]


async def test_cancelling_frees_the_request(tmp_path: Path) -> None:
    router = ScriptedRouter("words")
    router.forever, router.waits = True, 0.001
    async with served(tmp_path, router) as (client, _):
        text = ""
        # The key may have one request at once, which this one is.
        async with client.stream("POST", PATH, json={**ASKED, "stream": True}, headers=KEYS["c"]) as answer:
            pieces = answer.aiter_text()
            while not (name := text.partition('"id":"')[2].partition('"')[0]):
                text += await anext(pieces)
            assert (await client.post(f"{PATH}/{name}/cancel", headers=KEYS["a"])).status_code == 404
            # Its limit counts its answers; looking at them counts, too.
            assert (await client.get(f"{PATH}/{name}", headers=KEYS["c"])).status_code == 429
            cancelled = await client.post(f"{PATH}/{name}/cancel", headers=KEYS["c"])
            assert cancelled.status_code == 200 and cancelled.json()["status"] == "cancelled"
            async for piece in pieces:
                text += piece
        events = response_events_of(text)
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
        assert router.left == 1
        # What was said is kept; there is nothing left to cancel.
        stored = (await client.get(f"{PATH}/{name}", headers=KEYS["c"])).json()
        assert stored == events[-1]["response"] and stored["output"][0]["status"] == "incomplete"
        again = await client.post(f"{PATH}/{name}/cancel", headers=KEYS["c"])
        assert (again.status_code, again.json()["error"]["code"]) == (400, "response_has_ended")
        lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
        assert ("Responses", "cancelled") in [(line["method"], line["outcome"]) for line in lines]
        assert [line["outcome"] for line in lines if line["method"] == "CancelResponse"] == ["HttpError", "ok", "HttpError"]


async def test_what_is_being_stored_cannot_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storing, may_go_on, put = asyncio.Event(), asyncio.Event(), ResponsesInMemory.put

    async def slowly(self: ResponsesInMemory, *given: Any) -> bool:
        storing.set()
        await may_go_on.wait()
        return await put(self, *given)

    monkeypatch.setattr(ResponsesInMemory, "put", slowly)
    async with served(tmp_path) as (client, _):
        async with client.stream("POST", PATH, json={**ASKED, "stream": True}, headers=KEYS["a"]) as answer:
            parts = answer.aiter_text()
            text = await anext(parts)
            name = json.loads(text.split("\n")[1].removeprefix("data: "))["response"]["id"]
            await storing.wait()
            refused = await client.post(f"{PATH}/{name}/cancel", headers=KEYS["a"])
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_has_ended")
            may_go_on.set()
            text += "".join([part async for part in parts])
        stored = (await client.get(f"{PATH}/{name}", headers=KEYS["a"])).json()
    assert response_events_of(text)[-1]["response"] == stored and stored["status"] in ("completed", "incomplete")


async def test_an_answer_in_progress_can_be_looked_at(tmp_path: Path) -> None:
    router = ScriptedRouter("words")
    router.forever, router.waits = True, 0.001
    async with served(tmp_path, router) as (client, _):
        async with client.stream("POST", PATH, json={**ASKED, "stream": True}, headers=KEYS["a"]) as answer:
            text = await anext(answer.aiter_text())
            name = json.loads(text.split("\n")[1].removeprefix("data: "))["response"]["id"]
            seen = (await client.get(f"{PATH}/{name}", headers=KEYS["a"])).json()
            assert (seen["status"], seen["usage"]) == ("in_progress", None)
            check_response(seen)
        # A client that leaves ends its answer.
        for _ in range(200):
            if (left := await client.get(f"{PATH}/{name}", headers=KEYS["a"])).status_code == 404:
                break
            await asyncio.sleep(0.01)
        assert (router.left, left.status_code) == (1, 404)


async def test_to_forget_a_tenant_forgets_its_responses() -> None:
    settings = load(flags=[*tiny_settings(), "server.http_port=0", "server.ops_port=null"], environ={})
    async with (
        opened_entry(ScriptedRouter("words"), settings, Observing(settings, on_ray=False)) as addresses,
        httpx2.AsyncClient(base_url=str(addresses.http), timeout=60) as client,
    ):
        name = (await client.post(PATH, json=ASKED)).json()["id"]
        assert (await client.get(f"{PATH}/{name}")).status_code == 200
        async with outrider.AsyncClient(addresses.grpc) as grpc:
            await grpc.forget()
        assert (await client.get(f"{PATH}/{name}")).status_code == 404


def test_several_routers_keep_nothing() -> None:
    def most(*flags: str) -> int:
        config = component_configs.http_config(load(flags=list(flags), environ={}))
        assert config is not None
        return config.responses.most

    assert most() == 10_000 and most("server.stored_responses=7") == 7
    assert most("router.replicas=2") == 0
