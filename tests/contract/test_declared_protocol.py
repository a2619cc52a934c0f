"""Answers are as they are declared. schemathesis asks a live service, as its own /openapi.json describes it: nothing fails, and nothing undeclared is answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from services.api.config import HttpConfig
from services.api.http.openai.protocol.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionEvent
from services.api.http.server import serve_http
from tests.servers.http_service import http_served
from tests.servers.service import pipeline

# Not whether what fits a schema is taken: rules between fields are none that a schema can say.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
SECONDS = 40


CHAT = {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 2}
TEXT = {"prompt": "abc", "logprobs": 2, "echo": True}
ALL = {
    "max_tokens": 4,
    "n": 2,
    "seed": 1,
    "return_token_ids": True,
    "speculation": {"report": "trees"},
    "service_tier": "auto",
}


@pytest.mark.parametrize(
    ("path", "body", "whole", "event"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
        ("/v1/completions", TEXT, Completion, CompletionEvent),
    ],
)
async def test_answers_and_events_are_as_they_are_declared(
    tiny_model: Path, path: str, body: dict[str, Any], whole: type[BaseModel], event: type[BaseModel]
) -> None:
    async with pipeline(tiny_model) as running:
        server = await serve_http(running.router, HttpConfig(port=0))
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            answer = await client.post(path, json={**body, **ALL, "prompt_logprobs": 1})
            streamed = await client.post(
                path, json={**body, **ALL, "stream": True, "stream_options": {"include_usage": True}}
            )
        await server.stop(0)
    whole.model_validate(answer.json())
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 4 and events.pop() == "[DONE]"
    for told in events:
        event.model_validate_json(told)


@pytest.mark.exhaustive
def test_a_service_answers_as_it_declares(tiny_model: Path, tmp_path: Path) -> None:
    with http_served(tiny_model, config=HttpConfig(port=0, metrics=True)) as service:
        command = [
            Path(sys.executable).with_name("schemathesis"), "run", f"{service.url}/openapi.json", "--checks", ",".join(CHECKS),
            "--max-time", str(SECONDS), "--phases", "examples,coverage,fuzzing", "--request-timeout", "30", "--seed", "7",
            "--suppress-health-check", "all", "--no-shrink", "--warnings", "off", "--continue-on-failure",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 6, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
