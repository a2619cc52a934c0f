"""llama-server's /completion: the text of /v1/completions, in its own shape."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from services.api.http.llama_server.protocol import LlamaEvent, LlamaReply
from tests.servers.http_service import HttpService

CLIENT = httpx2.Client(timeout=60)
OWN: dict[str, Any] = {"seed": 5, "temperature": 1.0}
# As a page for writers sends it whose user has chosen nothing.
NEUTRAL: dict[str, Any] = {
    "dynatemp_range": 0, "dynatemp_exponent": 1, "tfs_z": 1, "repeat_penalty": 1, "repeat_last_n": 64, "mirostat": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "grammar": "", "cache_prompt": True, "xtc_probability": 0, "dry_multiplier": 0,
    "n_probs": 0, "return_tokens": False, "min_keep": 0, "n_keep": 0, "lora": [], "id_slot": -1, "timings_per_token": False,
    "logit_bias": [], "n": 1,
}  # fmt: skip


def post(service: HttpService, path: str, **body: Any) -> httpx2.Response:
    return CLIENT.post(service.url + path, json=body)


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    found = [json.loads(block.removeprefix("data: ")) for block in blocks]
    for event in found:
        LlamaEvent.model_validate(event, strict=True)
    return found


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {**OWN, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.3}]
)
def test_a_text_goes_on_as_in_completions(both_entries: HttpService, sampling: dict[str, Any]) -> None:
    ours = {**sampling, **({"repetition_penalty": sampling["repeat_penalty"]} if "repeat_penalty" in sampling else {})}
    ours.pop("repeat_penalty", None)
    plain = post(both_entries, "/v1/completions", prompt="the quick", max_tokens=12, return_token_ids=True, **ours).json()
    (choice,) = plain["choices"]
    asked = {"prompt": "the quick", "n_predict": 12, "return_tokens": True, **sampling}
    whole = LlamaReply.model_validate(post(both_entries, "/completion", **asked).json(), strict=True)
    assert (whole.content, whole.tokens, whole.stop_type) == (choice["text"], choice["token_ids"], "limit")
    assert whole.tokens_evaluated == plain["usage"]["prompt_tokens"] and whole.timings["predicted_n"] == 12
    events = events_of(post(both_entries, "/completion", **asked, stream=True))
    assert "".join(event["content"] for event in events) == whole.content
    assert [id for event in events for id in event.get("tokens", ())] == whole.tokens
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    by_ids = post(both_entries, "/completion", **{**asked, "prompt": choice["prompt_token_ids"]}).json()
    assert by_ids["tokens"] == whole.tokens


def test_what_asks_for_nothing_changes_nothing(both_entries: HttpService) -> None:
    asked = {"prompt": "the quick", "n_predict": 8, **OWN}
    plain = post(both_entries, "/completion", **asked)
    sent = post(both_entries, "/completion", **asked, **NEUTRAL, typical_p=1, samplers=["top_k", "temperature"])
    assert sent.status_code == 200, sent.text
    assert sent.json()["content"] == plain.json()["content"]
    assert "x-outrider-ignored" not in plain.headers
    assert sent.headers["x-outrider-ignored"] == "samplers, typical_p"


def test_of_how_many_tokens_a_models_own_penalty_counts_is_left_out(both_entries: HttpService) -> None:
    asked = {"prompt": "the quick", "n_predict": 8, **OWN}
    sent = post(both_entries, "/completion", **asked, repeat_last_n=64)
    assert (sent.status_code, sent.headers["x-outrider-ignored"]) == (200, "repeat_last_n"), sent.text
    assert sent.json()["content"] == post(both_entries, "/completion", **asked).json()["content"]


def test_an_answer_follows_a_schema(both_entries: HttpService) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    answer = post(both_entries, "/completion", prompt="fox", n_predict=60, json_schema=schema, **OWN).json()
    assert json.loads(answer["content"]) == {"a": 7} and answer["stop_type"] == "eos"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["the", "fox"]}, "prompt"),
        ({"prompt": {"prompt_string": "the"}}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": "x", "n_predict": -2}, "n_predict"),
        ({"prompt": "x", "n_predict": 100_000}, "n_predict"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "x", "stop": "x"}, "stop"),
        ({"prompt": "x", "repeat_penalty": -1}, "repeat_penalty"),
        ({"prompt": "x", "repeat_penalty": 1.2, "repeat_last_n": 64}, "repeat_last_n"),
        ({"prompt": "x", "mirostat": 2}, "mirostat"),
        ({"prompt": "x", "typical_p": 0.9}, "typical_p"),
        ({"prompt": "x", "n_probs": 5}, "n_probs"),
        ({"prompt": "x", "grammar": "root ::= [a-z]+"}, "grammar"),
        ({"prompt": "x", "json_schema": {"type": "hiccup"}}, "json_schema"),
        ({"prompt": "x", "json_schema": "{}"}, "json_schema"),
        ({"prompt": "x", "logit_bias": [[15043, 1.0]]}, "logit_bias"),
        ({"prompt": "x", "logit_bias": 0}, "logit_bias"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "response_fields": ["content"] * 65}, "response_fields"),
        ({"prompt": "x", "response_fields": ["a" * 129]}, "response_fields"),
        ({"prompt": "x", "input_suffix": "y"}, "input_suffix"),
        ({"prompt": "x", "model": "nobody"}, "model"),
    ],
)
def test_what_is_refused_is_named(both_entries: HttpService, body: dict[str, Any], field: str) -> None:
    answer = post(both_entries, "/completion", **body)
    assert answer.status_code in (400, 404), answer.text
    assert (answer.json()["error"]["param"] or "").startswith(field), answer.text
