"""Log-probabilities of a prompt's own tokens: those of transformers on the same weights, however the prompt is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.servers.http_service import HttpService, http_served
from tests.servers.openai_types import events_of

CLIENT = httpx2.Client(timeout=60)
TEXT = "the quick brown fox jumps over the lazy dog, and before that"


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[HttpService]:
    # Prompts take several passes.
    with http_served(tiny_model, "verifier.max_batched_tokens=7") as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def complete(service: HttpService, **body: Any) -> dict[str, Any]:
    answer = CLIENT.post(f"{service.url}/v1/completions", json={"prompt": TEXT, "max_tokens": 3, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids_of(service: HttpService, text: str = TEXT) -> list[int]:
    found: list[int] = CLIENT.post(f"{service.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def expected(model: Any, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]


def close(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and all(math.isclose(a, b, abs_tol=2e-5) for a, b in zip(found, wanted, strict=True))


def test_an_echoed_prompt_has_its_log_probabilities(service: HttpService, model: Any) -> None:
    ids = ids_of(service)
    answer = complete(service, echo=True, logprobs=2, return_token_ids=True)
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert {len(listed) for listed in told.values()} == {len(ids) + 3}
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert close(told["token_logprobs"][1:], expected(model, [*ids, *choice["token_ids"]]))
    assert "".join(told["tokens"]) == choice["text"] and choice["text"].startswith(TEXT)
    assert told["text_offset"] == [len("".join(told["tokens"][:at])) for at in range(len(ids) + 3)]
    for token, logprob, top in zip(told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert top[token] == logprob and len(top) in (2, 3) and max(top.values()) >= logprob


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_echoed_prompt_that_was_cut_is_what_the_model_was_shown(service: HttpService, side: str) -> None:
    ids = ids_of(service)
    # Of tokens that are whole characters.
    kept = {"truncate_prompt_tokens": 5, "truncation_side": side, "allowed_token_ids": ids}
    for prompt in (TEXT, ids):
        (choice,) = complete(service, prompt=prompt, echo=True, logprobs=1, return_token_ids=True, **kept)["choices"]
        told = choice["logprobs"]
        assert choice["prompt_token_ids"] == (ids[-5:] if side == "left" else ids[:5])
        assert choice["text"].startswith("".join(told["tokens"][:5]))
        assert told["text_offset"][:6] == [len("".join(told["tokens"][:at])) for at in range(6)]
        assert complete(service, prompt=prompt, echo=True, **kept)["choices"][0]["text"] == choice["text"]
    whole = complete(service, echo=True, truncate_prompt_tokens=len(ids))["choices"][0]["text"]
    assert whole == complete(service, echo=True)["choices"][0]["text"]


def test_nothing_is_answered_where_nothing_is_wanted(service: HttpService, model: Any) -> None:
    ids = ids_of(service)
    answer = complete(service, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == len(ids)
    assert close(choice["logprobs"]["token_logprobs"][1:], expected(model, ids))
    assert complete(service, max_tokens=0)["choices"][0]["text"] == ""


def test_what_is_cached_is_computed_again_and_leaves_the_cache_as_it_is(service: HttpService) -> None:
    long = " ".join([TEXT] * 4)
    plain = complete(service, prompt=long)
    assert complete(service, prompt=long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    first = complete(service, prompt=long, echo=True, logprobs=0)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["choices"][0]["text"] == long + plain["choices"][0]["text"]
    assert complete(service, prompt=long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert complete(service, prompt=long, echo=True, logprobs=0)["choices"][0]["logprobs"] == first["choices"][0]["logprobs"]


def test_the_same_bits_alone_and_beside_others(service: HttpService) -> None:
    texts = [TEXT, "lazy dog", TEXT + " fox" * 20]
    together = complete(service, prompt=texts, echo=True, logprobs=1, max_tokens=0)["choices"]
    alone = [complete(service, prompt=text, echo=True, logprobs=1, max_tokens=0)["choices"][0] for text in texts]
    assert [choice["logprobs"] for choice in together] == [choice["logprobs"] for choice in alone]


def test_a_stream_tells_the_prompt_first(service: HttpService) -> None:
    whole = complete(service, echo=True, logprobs=1, seed=1)["choices"][0]
    body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0, "seed": 1, "echo": True, "logprobs": 1, "stream": True}
    events = events_of(CLIENT.post(f"{service.url}/v1/completions", json=body).text)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"] and choices[0]["text"] == TEXT
    for name, listed in whole["logprobs"].items():
        assert [each for choice in choices if choice["logprobs"] for each in choice["logprobs"][name]] == listed


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_by_token_id(service: HttpService, model: Any, path: str) -> None:
    given: dict[str, Any] = {"prompt": TEXT} if path == "completions" else {"messages": [{"role": "user", "content": "fox"}]}
    body = {**given, "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}
    answer = CLIENT.post(f"{service.url}/v1/{path}", json=body).json()
    place = answer["choices"][0] if path == "completions" else answer
    ids, found = place["prompt_token_ids"], place["prompt_logprobs"]
    assert found[0] is None and len(found) == len(ids)
    assert close(
        [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], found[1:], strict=True)], expected(model, ids)
    )
    for entry in found[1:]:
        ranks = sorted(each["rank"] for each in entry.values() if each["rank"] is not None)
        assert ranks == [1, 2]
    streamed = CLIENT.post(f"{service.url}/v1/{path}", json={**body, "stream": True})
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "prompt_logprobs"
