"""Log-probabilities of a prompt's tokens over gRPC are those over HTTP, also of prompts that need several messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from outrider import Client, InvalidArgument
from services.api.grpc.messages import encode_events
from services.api.messages import TextChunk
from speculation.types import TokenLogprobs
from tests.servers.http_service import HttpService, http_served


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[HttpService]:
    with http_served(tiny_model, "verifier.max_batched_tokens=7") as running:
        yield running


def test_both_doors_tell_the_same(service: HttpService) -> None:
    prompt = "the quick brown fox jumps over the lazy dog"
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    (choice,) = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=60).json()["choices"]
    with Client(service.grpc) as client:
        # Twice: what is known of the prompt by now changes nothing.
        answers = [client.generate(prompt, max_tokens=2, prompt_logprobs=2) for _ in range(2)]
        chunks = list(client.stream(prompt, max_tokens=2, prompt_logprobs=2))
        plain = client.generate(prompt, max_tokens=2)
    for answer in answers:
        told = [{str(each.token_id): each.logprob for each in (*entry.top, entry)} for entry in answer.prompt_logprobs]
        wanted = [{id: each["logprob"] for id, each in entry.items()} for entry in choice["prompt_logprobs"][1:]]
        assert told == wanted and len(told) == answer.usage.prompt_tokens - 1
        assert tuple(entry.token_id for entry in answer.prompt_logprobs) == answer.prompt_token_ids[1:]
        assert answer.token_ids == plain.token_ids
    assert plain.prompt_logprobs == () and [bool(chunk.prompt_logprobs) for chunk in chunks] == [True, False]


def test_too_many_are_refused_by_name(service: HttpService) -> None:
    with Client(service.grpc) as client, pytest.raises(InvalidArgument) as refused:
        client.generate("a", prompt_logprobs=21)
    assert refused.value.field == "prompt_logprobs"


def test_those_of_a_long_prompt_come_in_messages_that_are_soon_made() -> None:
    ids = tuple(range(20))
    scores = tuple(
        TokenLogprobs(token_id=2**18 + at, logprob=-1.5, top_ids=ids, top_logprobs=(-1.5,) * 20) for at in range(10_000)
    )
    messages = list(encode_events(TextChunk(text="a", token_ids=(7,), prompt_logprobs=scores)))
    assert [len(each.chunk.prompt_logprobs) for each in messages] == [512] * 19 + [272]
    assert [entry.token_id for each in messages for entry in each.chunk.prompt_logprobs] == [
        each.token_id for each in scores
    ]
    assert [list(each.chunk.token_ids) for each in messages] == [[]] * 19 + [[7]]
    assert all(each.ByteSize() < 1 << 17 for each in messages)
