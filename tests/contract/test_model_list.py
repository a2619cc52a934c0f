"""The served models, as OpenAI's and Anthropic's clients list them."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from services.api.http.messages.replies import MessageErrorReply
from services.api.http.openai.protocol.service_answers import Models
from services.model_files.folder import written_at
from tests.contract.test_messages import served
from tests.servers.scripted_router import CARD, ScriptedRouter

RELEASED = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)
NAMES = ["scripted", "second", "third", "tuned"]


def router() -> ScriptedRouter:
    found = ScriptedRouter("hello")
    found.card = replace(CARD, created=int(RELEASED.timestamp()), aliases=("second", "third"), adapters={"tuned": "a"})
    return found


async def test_both_clients_get_the_name_and_the_time_of_each_model() -> None:
    async with served(router()) as (client, server):
        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == [model.display_name for model in listed] == NAMES
        assert {(model.created_at, model.type, model.max_input_tokens) for model in listed} == {(RELEASED, "model", 4096)}
        assert (await client.models.retrieve("tuned")).created_at == RELEASED
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as other:
            assert [(model.id, model.created) async for model in other.models.list()] == [
                (name, int(RELEASED.timestamp())) for name in NAMES
            ]
        async with httpx2.AsyncClient(base_url=server.url) as plain:
            Models.model_validate((await plain.get("/v1/models")).json(), strict=True)


@pytest.mark.parametrize(
    ("query", "found", "more"),
    [
        ({"limit": 2}, NAMES[:2], True),
        ({"limit": 2, "after_id": "second"}, NAMES[2:], False),
        ({"limit": 2, "before_id": "tuned"}, NAMES[1:3], True),
        ({"after_id": "scripted", "before_id": "tuned"}, NAMES[1:3], False),
        ({"after_id": "tuned"}, [], False),
    ],
)
async def test_a_part_of_the_list(query: dict[str, Any], found: list[str], more: bool) -> None:
    async with served(router()) as (client, _):
        page = await client.models.list(**query)
        assert ([model.id for model in page.data], page.has_more) == (found, more)
        assert (page.first_id, page.last_id) == ((found[0], found[-1]) if found else (None, None))


async def test_pages_follow_each_other() -> None:
    async with served(router()) as (client, _):
        assert [model.id async for model in client.models.list(limit=1)] == NAMES


async def test_what_is_not_there_is_refused_in_the_clients_words() -> None:
    async with served(router()) as (client, server):
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("claude-9")
        MessageErrorReply.model_validate(missing.value.body, strict=True)
        with pytest.raises(anthropic.NotFoundError) as unserved:
            await client.beta.files.list()
        MessageErrorReply.model_validate(unserved.value.body, strict=True)
        for query in ({"limit": 0}, {"limit": 1001}, {"after_id": "claude-9"}, {"before_id": ""}):
            with pytest.raises(anthropic.BadRequestError, match=next(iter(query))):
                await client.models.list(**query)  # type: ignore[arg-type]
        async with httpx2.AsyncClient(base_url=server.url) as plain:
            assert (await plain.get("/v1/models/claude-9")).json()["error"]["code"] == "model_not_found"
            for limit in ("9" * 5000, "0" * 5000, "²", "+1", "1001", ""):
                refused = await plain.get("/v1/models", params={"limit": limit})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit"), limit[:9]


def test_the_time_is_that_of_the_weights(tmp_path: Path) -> None:
    assert written_at(tmp_path) == 0
    for name, seconds in (("config.json", 300), ("a.safetensors", 100), ("b.safetensors", 200), ("README.md", 400)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
        assert written_at(tmp_path) == (300 if name == "config.json" else 100 if name == "a.safetensors" else 200)
    assert written_at(tmp_path / "a.safetensors") == 100


async def test_ollamas_clients_are_told_in_its_shape_what_is_not_served() -> None:
    async with served(router()) as (_, server), httpx2.AsyncClient(base_url=server.url) as plain:
        for method, path, named in (("POST", "/api/pull", "/v1/models"), ("POST", "/api/embed", "embeddings")):
            answer = await plain.request(method, path)
            assert answer.status_code == 404
            (told,) = answer.json().items()
            assert told[0] == "error" and told[1].startswith(f"there is no {path}: ") and named in told[1]
        # LM Studio's clients read errors as OpenAI's.
        assert "/v1/models" in (await plain.get("/api/v0/models")).json()["error"]["message"]
