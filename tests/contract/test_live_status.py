"""The live state of a whole service: what its answers add up to, and whether its drafters are there."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from services.api import lately
from tests.servers.http_service import HttpService


async def test_it_grows_by_each_answer(both_entries: HttpService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lately, "_FRESH_S", 0.0)
    async with httpx2.AsyncClient(base_url=both_entries.url, timeout=60) as client:

        async def status() -> dict[str, Any]:
            return dict((await client.get("/v1/outrider/status")).json())

        before = await status()
        body = {"prompt": "one two one two one two", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        answer = (await client.post("/v1/completions", json={**body, "speculation": {"strategy": "suffix"}})).json()
        after = await status()
    assert after["ready"] is True and after["components"] == {"verifier": {"running": 1}}
    assert after["requests"] == {"running": 0, "waiting": 0}
    told = answer["metrics"]["speculative_decoding"]
    assert grown(before, after, "decoding", "tokens") == answer["usage"]["completion_tokens"] == 24
    assert grown(before, after, "decoding", "passes") == told["num_spec_steps"]
    assert grown(before, after, "cache", "prompt_tokens") == answer["usage"]["prompt_tokens"]
    assert by_source(after, "suffix") - by_source(before, "suffix") == told["accepted_by_source"].get("suffix", 0)
    (verifier,) = after["verifiers"]
    assert verifier["drafters"] == {"the drafter": True}


def grown(before: dict[str, Any], after: dict[str, Any], part: str, name: str) -> int:
    return int(after[part][name] - before[part][name])


def by_source(status: dict[str, Any], source: str) -> int:
    return sum(each["accepted"] for each in status["sources"] if each["source"] == source)
