"""Over HTTP, too, a key's limits are looked at before its prompts are read, and what is refused leaves a trace."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.server import serve_http
from services.api.messages import ClientRequest
from services.metrics.prometheus_sink import PrometheusSink
from tests.servers.scripted_router import ScriptedRouter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FOX = [{"role": "user", "content": "fox"}]
KEY = "k" * 20


class Counting(ScriptedRouter):
    """Counts how often it was asked to read a text."""

    read = 0

    @override
    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        self.read += 1
        return await super().tokenize(request)


class Served:
    def __init__(self, client: httpx2.AsyncClient, router: Counting, audit: Path, sink: PrometheusSink) -> None:
        self.client, self.router, self._audit, self._sink = client, router, audit, sink

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.client.post(path, json=body, headers={"x-api-key": KEY})

    @property
    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._audit.read_text().splitlines()]

    def counted(self, outcome: str, code: str) -> float:
        families = text_string_to_metric_families(self._sink.exposition().decode())
        wanted = ("outrider_requests_total", {"outcome": outcome, "code": code})
        return sum(each.value for family in families for each in family.samples if (each.name, each.labels) == wanted)


@asynccontextmanager
async def served(folder: Path, record: str) -> AsyncIterator[Served]:
    keys, audit, sink, router = folder / "keys.yaml", folder / "audit", PrometheusSink(), Counting("words")
    keys.write_text(f"- {{hash: {hash_key(KEY)}, id: a, {record}}}\n")
    public = PublicServerConfig(port=0, keys_file=keys)
    gate = open_gate((), keys, str(audit), sink)
    server = await serve_http(router, HttpConfig(port=0, public=public), gate)
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        yield Served(client, router, audit, sink)
    await server.stop(0)
    gate.close()


@pytest.mark.parametrize(
    ("record", "status"), [("scopes: [forget]", 403), ("requests_per_minute: 1", 429), ("tokens_per_minute: 20", 429)]
)
async def test_who_may_not_ask_gets_nothing_tokenised(tmp_path: Path, record: str, status: int) -> None:
    async with served(tmp_path, record) as service:
        first = await service.post(TEXT, prompt="fox", max_tokens=17)
        read = service.router.read
        assert first.status_code == (status if status == 403 else 200) and read == (0 if status == 403 else 1)
        for path, body in ((CHAT, {"messages": FOX, "max_tokens": 17}), (TEXT, {"prompt": "fox", "max_tokens": 17})):
            assert (await service.post(path, **body)).status_code == status
        assert service.router.read == read


async def test_reading_texts_counts_as_a_request(tmp_path: Path) -> None:
    asked = {"/tokenize": {"prompt": "fox"}, "/detokenize": {"tokens": [1, 2]}}
    async with served(tmp_path, "requests_per_minute: 2") as service:
        assert [(await service.post(path, **body)).status_code for path, body in asked.items()] == [200, 200]
        refused = [await service.post(path, **body) for path, body in asked.items()]
        assert [(each.status_code, each.headers["retry-after"]) for each in refused] == [(429, "30")] * 2
        assert service.router.read == 1
        outcomes = [(line["method"], line["outcome"]) for line in service.recorded]
        assert outcomes == [
            ("Tokenize", "ok"), ("Detokenize", "ok"), ("Tokenize", "ResourceExhausted"), ("Detokenize", "ResourceExhausted"),
        ]  # fmt: skip


async def test_what_is_refused_after_its_prompt_was_read_is_recorded_and_counted(tmp_path: Path) -> None:
    async with served(tmp_path, "tokens_per_minute: 100000, requests_per_minute: 100") as service:
        assert (await service.post(TEXT, prompt="x" * 5000)).json()["error"]["code"] == "context_length_exceeded"
        unknown = await service.post(CHAT, messages=FOX, model="no such model")
        assert unknown.status_code == 404
        # What was charged for them came back.
        assert unknown.headers["x-ratelimit-remaining-tokens"] == "100000"
        assert [(line["method"], line["outcome"], line["model"]) for line in service.recorded] == [
            ("Completions", "PromptTooLong", None),
            ("ChatCompletions", "NotFound", "no such model"),
        ]
        assert service.counted("refused", "OUT_OF_RANGE") == service.counted("refused", "NOT_FOUND") == 1


async def test_each_answer_is_recorded_once(tmp_path: Path) -> None:
    async with served(tmp_path, "max_concurrent: 4, tokens_per_minute: 1000") as service:
        for _ in range(2):
            answer = await service.post(TEXT, prompt=["fox", "dog"], n=2, max_tokens=7)
            assert len(answer.json()["choices"]) == 4
        assert [line["outcome"] for line in service.recorded] == ["ok"] * 8
        assert {line["model"] for line in service.recorded} == {"scripted"}
        # Four prompts of three tokens and four answers of five, twice.
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 1000 - 32


@pytest.mark.parametrize(
    ("record", "body", "field"),
    [
        ("max_concurrent: 2", {"prompt": "fox", "n": 3}, "n"),
        ("requests_per_minute: 2", {"prompt": "fox", "n": 3}, "n"),
        ("max_concurrent: 2", {"prompt": ["a", "b", "c"]}, "prompt"),
        ("tokens_per_minute: 100", {"prompt": "fox", "n": 3, "max_tokens": 60}, "max_tokens"),
    ],
)
async def test_what_the_limits_can_never_allow_is_not_to_be_tried_again(
    tmp_path: Path, record: str, body: dict[str, Any], field: str
) -> None:
    async with served(tmp_path, record) as service:
        answer = await service.post(TEXT, **body)
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        error = answer.json()["error"]
        assert error["param"] == field and record.partition(":")[0] in error["message"]
        assert service.router.read == 0
        # The limit itself is allowed.
        assert (await service.post(TEXT, **{**body, "prompt": "fox", "n": 2, "max_tokens": 9})).status_code == 200


async def test_asking_whether_the_model_is_loaded_counts_as_a_request(tmp_path: Path) -> None:
    async with served(tmp_path, "requests_per_minute: 2") as service:
        told = [await service.post(path) for path in ("/api/chat", "/api/generate", "/api/chat")]
        assert [each.status_code for each in told] == [200, 200, 429]
        assert [(each["method"], each["outcome"]) for each in service.recorded] == [
            ("OllamaLoad", "ok"), ("OllamaLoad", "ok"), ("OllamaLoad", "ResourceExhausted"),
        ]  # fmt: skip
    async with served(tmp_path, "scopes: [observe]") as service:
        assert (await service.post("/api/generate")).status_code == 403
