"""/openapi.json and /docs: all paths of the application, what they take and answer, and a page that needs nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.app import HttpApp
from services.api.http.operations import OPERATIONS
from services.api.http.page import DOCS, content_security_policy
from services.api.http.responses.stored_responses import ResponsesInMemory
from tests.servers.scripted_router import ScriptedRouter
from tests.unit.api.test_page import served

KEYED = HttpConfig(port=0, metrics=True, public=PublicServerConfig(port=0, api_key_hashes=(hash_key("k" * 20),)))


def references(value: Any) -> set[str]:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = {value["$ref"]} if isinstance(value, dict) and isinstance(value.get("$ref"), str) else set()
    return own.union(*map(references, below))


async def document(config: HttpConfig | None = None) -> dict[str, Any]:
    async with served(config) as client:
        answer = await client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = answer.json()
    return found


def test_it_tells_of_every_path_of_the_application() -> None:
    paths = HttpApp(ScriptedRouter(), KEYED, open_gate((), None, None), ResponsesInMemory(KEYED.responses))._paths
    assert {(each.path, each.method.upper()) for each in OPERATIONS} == {
        (path, one.method) for path, each in paths.items() for one in each.all
    }
    assert {each.path for each in OPERATIONS if each.is_open} == {path for path, each in paths.items() if each.is_open}


async def test_it_describes_bodies_answers_streams_errors_and_keys() -> None:
    found = await document(KEYED)
    chat = found["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    content = chat["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    event = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
    assert event == {"$ref": "#/components/schemas/ChatCompletionChunk"}
    assert {"400", "401", "403", "404", "413", "415", "429", "500", "503"} <= chat["responses"].keys()
    assert chat["security"] == [{"bearer": []}, {"header": []}] and found["paths"]["/health"]["get"]["security"] == []
    assert {each.rpartition("/")[2] for each in references(found)} <= found["components"]["schemas"].keys()
    fields = found["components"]["schemas"]["ChatBody"]
    assert fields["additionalProperties"] is False and fields["required"] == ["messages"]
    assert fields["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 16}
    assert fields["properties"]["user"]["x-effect"] == "none" and fields["properties"]["audio"]["type"] == "null"


async def test_without_keys_nothing_needs_one() -> None:
    paths = (await document())["paths"]
    assert "/metrics" not in paths
    assert all(operation["security"] == [] for methods in paths.values() for operation in methods.values())


async def test_browsers_get_a_page_that_needs_nothing_else() -> None:
    async with served() as client:
        answer = await client.get("/docs")
    assert answer.status_code == 200 and answer.content == DOCS.read_bytes()
    assert answer.headers["content-security-policy"] == content_security_policy(DOCS.read_bytes())
    text = DOCS.read_text()
    assert not re.search(
        r"<[a-z][^>]*\s(style|on[a-z]+)=|innerHTML|outerHTML|insertAdjacent|document\.write|https?://", text
    )
    assert len(text) < 12 * 1024


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_a_setting_turns_them_off(path: str) -> None:
    async with served(HttpConfig(port=0, page=False)) as client:
        assert (await client.get(path)).status_code == 404


async def test_where_metrics_are_off_the_refusal_names_the_setting() -> None:
    async with served() as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 404 and "server.metrics: true" in answer.json()["error"]["message"]
