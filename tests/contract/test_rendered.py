"""What a chat would ask of the model, without asking it; and paths of other APIs, which say what to use instead."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from tests.servers.http_service import HttpService

CHAT = "/v1/chat/completions"
CLIENT = httpx2.Client(timeout=60)
FOX: list[Any] = [{"role": "user", "content": "fox"}]


def test_a_chat_is_rendered_as_it_is_answered(both_entries: HttpService) -> None:
    body = {"messages": FOX, "max_tokens": 7, "seed": 3, "temperature": 0.5, "top_k": 4, "stop": ["x"], "n": 2}
    rendered = CLIENT.post(f"{both_entries.url}{CHAT}/render", json=body).json()
    answer = CLIENT.post(both_entries.url + CHAT, json={**body, "return_token_ids": True}).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    wanted = {"max_tokens": 7, "seed": 3, "temperature": 0.5, "top_k": 4, "stop": ["x"], "n": 2, "skip_special_tokens": True}
    assert rendered["sampling_params"] == wanted
    assert (rendered["model"], rendered["stream"], rendered["priority"]) == ("tiny", False, 0)
    # What it says can be asked as it is.
    again = CLIENT.post(
        f"{both_entries.url}/v1/completions",
        json={"prompt": rendered["token_ids"], "return_token_ids": True, **rendered["sampling_params"]},
    ).json()
    assert [each["token_ids"] for each in again["choices"]] == [each["token_ids"] for each in answer["choices"]]
    wrong = CLIENT.post(f"{both_entries.url}{CHAT}/render", json={**body, "max_tokens": 100_000})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")


def test_a_form_is_rendered(both_entries: HttpService) -> None:
    body = {"messages": FOX, "response_format": {"type": "json_object"}}
    rendered = CLIENT.post(f"{both_entries.url}{CHAT}/render", json=body).json()
    assert rendered["sampling_params"]["structured_outputs"]["kind"] == "json_object"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embedding models"),
        ("/v1/rerank", "reranking models"),
        ("/rerank", "reranking models"),
        ("/v1/audio/speech", "speech models"),
        ("/v1/audio/transcriptions", "speech models"),
        ("/v1/images/generations", "image models"),
        ("/v1/moderations", "guard model"),
    ],
)
def test_what_is_not_served_says_so(both_entries: HttpService, path: str, word: str) -> None:
    answer = CLIENT.post(both_entries.url + path, json={"input": "x"})
    told = answer.json()["error"]
    assert (answer.status_code, told["code"]) == (404, "unknown_url")
    assert "generates text only" in told["message"] and word in told["message"]


def test_paths_of_other_servers_lead_to_those_that_do_the_same(both_entries: HttpService) -> None:
    known = CLIENT.post(f"{both_entries.url}/nowhere", json={}).json()["error"]["message"]
    for path in (
        "/generate",
        "/server_info",
        "/flush_cache",
        "/sleep",
        "/api/v0/models",
        "/v1/batches",
        "/v1/responses/compact",
        "/v1/chat/completions/chatcmpl-1",
    ):
        answer = CLIENT.post(both_entries.url + path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        named = re.findall(r"(?:GET|POST) (/\S+)", answer.json()["error"]["message"])
        assert all(each in known for each in named), path
