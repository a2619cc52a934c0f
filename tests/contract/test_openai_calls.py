"""OpenAI's own client against the HTTP API of a whole service on a tiny model: every call that applies, whole and streamed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

import outrider
from tests.running.refusals import refuses
from tests.servers.http_service import HttpService
from tests.servers.openai_types import check, events_of

FOX: list[Any] = [{"role": "user", "content": "fox"}]
LONG = {"ignore_eos": True}
# One for all: making one takes longer than most calls.
CLIENT = httpx2.Client(timeout=60)


@pytest.fixture
def client(both_entries: HttpService) -> Iterator[OpenAI]:
    with OpenAI(base_url=both_entries.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def post(service: HttpService, path: str, **body: Any) -> dict[str, Any]:
    answer = CLIENT.post(service.url + path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(service: HttpService, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = CLIENT.post(service.url + path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    for event in events:
        check(event)
    assert len({(event["id"], event["created"], event["system_fingerprint"]) for event in events}) == 1
    return events


def content_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """What the events add to a choice's text."""
    texts = [c.get("text", c.get("delta", {}).get("content")) for e in events for c in e["choices"] if c["index"] == index]
    return "".join(text for text in texts if text)


def test_models_are_listed_and_looked_up(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.owned_by == "outrider"
    assert client.models.retrieve("tiny") == model
    extra = model.model_extra or {}
    assert extra["max_model_len"] == 512 and "blend" in extra["strategies"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_chat_whole_and_streamed(client: OpenAI, both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"messages": FOX, "max_tokens": 20, "seed": 3, "extra_body": LONG}
    whole = client.chat.completions.create(model="tiny", **asked)
    check(post(both_entries, "/v1/chat/completions", messages=FOX, max_tokens=20, seed=3, **LONG))
    assert whole.id.startswith("chatcmpl-") and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    chunks = list(client.chat.completions.create(model="tiny", stream=True, **asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].choices[0].delta.content is None
    assert all(c.usage is None for c in chunks)


async def test_the_async_client_and_the_helpers(both_entries: HttpService) -> None:
    async with AsyncOpenAI(base_url=both_entries.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model="tiny", prompt="fox", temperature=0, extra_body=LONG)
        parts = await client.completions.create(model="tiny", prompt="fox", temperature=0, stream=True, extra_body=LONG)
        assert "".join([part.choices[0].text async for part in parts]) == whole.choices[0].text
        assert whole.usage is not None and whole.usage.completion_tokens == 16
        # The client's own accumulator of streams reads ours.
        async with client.chat.completions.stream(model="tiny", messages=FOX, max_tokens=9, seed=1) as events:
            async for _ in events:
                final = events.current_completion_snapshot
        direct = await client.chat.completions.create(model="tiny", messages=FOX, max_tokens=9, seed=1)
        assert final.choices[0].message.content == direct.choices[0].message.content
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=FOX, max_tokens=2, extra_headers={"x-request-id": "mine-7"}
        )
        assert raw.headers["x-request-id"] == "mine-7" == raw.parse()._request_id


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 12},
        {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.2, "seed": 13},
        {"temperature": 1.0, "seed": 14, "logit_bias": {"70": 5, "71": -100}, "min_tokens": 5, "stop_token_ids": [40]},
    ],
    ids=str,
)
def test_http_answers_as_grpc_does(both_entries: HttpService, sampling: dict[str, Any]) -> None:
    own = {name: value for name, value in sampling.items() if name != "logit_bias"}
    if "logit_bias" in sampling:
        own["logit_bias"] = {int(key): value for key, value in sampling["logit_bias"].items()}
    with outrider.Client(both_entries.grpc) as client:
        chat = client.generate(messages=FOX, max_tokens=24, **own)
        text = client.generate("the quick brown", max_tokens=24, **own)
    for strategy in ("blend", "autoregressive"):
        shared = {"max_tokens": 24, "return_token_ids": True, "speculation": {"strategy": strategy}, **sampling}
        over_http = post(both_entries, "/v1/chat/completions", messages=FOX, **shared)
        choice = over_http["choices"][0]
        assert tuple(choice["token_ids"]) == chat.token_ids
        assert tuple(over_http["prompt_token_ids"]) == chat.prompt_token_ids
        assert choice["message"]["content"] == chat.text
        assert choice["finish_reason"] == chat.finish_reason and choice["stop_reason"] == chat.stop
        assert over_http["metrics"]["speculative_decoding"]["strategy"] == strategy
        events = stream(both_entries, "/v1/completions", prompt="the quick brown", **shared)
        assert tuple(id for e in events for c in e["choices"] for id in c.get("token_ids", ())) == text.token_ids
        assert content_of(events) == text.text


def test_defaults_are_those_of_openai(both_entries: HttpService) -> None:
    """Temperature 1, 16 tokens of text, as many of a chat as the context leaves; each answer names its seed."""
    first = post(both_entries, "/v1/completions", prompt="fox", return_token_ids=True, **LONG)
    assert len(first["choices"][0]["token_ids"]) == 16
    seed = first["choices"][0]["seed"]
    again = post(both_entries, "/v1/completions", prompt="fox", return_token_ids=True, temperature=1.0, seed=seed, **LONG)
    greedy = post(both_entries, "/v1/completions", prompt="fox", return_token_ids=True, temperature=0, seed=seed, **LONG)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"] != greedy["choices"][0]["token_ids"]
    chat = post(
        both_entries,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "fox " * 200}],
        truncate_prompt_tokens=480,
        **LONG,
    )
    assert chat["usage"]["total_tokens"] == 512
    assert chat["choices"][0]["finish_reason"] == "length"


def test_every_choice_can_be_had_alone(both_entries: HttpService) -> None:
    asked = {"messages": FOX, "max_tokens": 12, "return_token_ids": True, **LONG}
    many = post(both_entries, "/v1/chat/completions", n=4, seed=-2, **asked)
    assert [choice["seed"] for choice in many["choices"]] == [2**64 - 2, 2**64 - 1, 0, 1]
    texts = [choice["message"]["content"] for choice in many["choices"]]
    assert len(set(texts)) == 4
    for choice in many["choices"]:
        alone = post(both_entries, "/v1/chat/completions", seed=choice["seed"], **asked)
        assert alone["choices"][0]["token_ids"] == choice["token_ids"]
    assert many["usage"]["completion_tokens"] == 48
    assert many["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    events = stream(both_entries, "/v1/chat/completions", n=4, seed=-2, stream_options={"include_usage": True}, **asked)
    assert [content_of(events, index) for index in range(4)] == texts
    ends = [c for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(c["index"] for c in ends) == [0, 1, 2, 3] and {c["finish_reason"] for c in ends} == {"length"}
    # Choices take turns; none waits for another's end.
    told = [c["index"] for e in events for c in e["choices"] if c["delta"].get("content")]
    assert told != sorted(told)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 48
    assert all(event["usage"] is None for event in events[:-1])


def test_each_prompt_has_its_choices(client: OpenAI, both_entries: HttpService) -> None:
    prompts = ["fox fox", "the dog"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=8, seed=5, echo=True, extra_body=LONG)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:7] for choice in answer.choices] == ["fox fox", "fox fox", "the dog", "the dog"]
    for index, choice in enumerate(answer.choices):
        alone = client.completions.create(
            model="tiny", prompt=prompts[index // 2], max_tokens=8, seed=5 + index % 2, extra_body=LONG
        )
        assert choice.text == prompts[index // 2] + alone.choices[0].text
    assert answer.usage is not None and answer.usage.completion_tokens == 32
    events = stream(both_entries, "/v1/completions", prompt=prompts, n=2, max_tokens=8, seed=5, echo=True, **LONG)
    assert [content_of(events, index) for index in range(4)] == [choice.text for choice in answer.choices]
    ids = post(both_entries, "/tokenize", prompt="fox fox")["tokens"]
    by_ids = client.completions.create(model="tiny", prompt=[ids], max_tokens=8, seed=5, echo=True, extra_body=LONG)
    assert by_ids.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_log_probabilities_spell_the_text_exactly(both_entries: HttpService, seed: int) -> None:
    """A tiny model says many broken characters, and characters in several tokens."""
    asked = {"max_tokens": 40, "seed": seed, "return_token_ids": True, **LONG}
    whole = post(both_entries, "/v1/chat/completions", messages=FOX, logprobs=True, top_logprobs=3, **asked)
    check(whole)
    choice = whole["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 40
    data = b"".join(bytes(entry["bytes"] or []) for entry in entries)
    assert data.decode(errors="replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (top["logprob"] for top in entry["top_logprobs"]), reverse=True
        )
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0
    events = stream(both_entries, "/v1/chat/completions", messages=FOX, logprobs=True, top_logprobs=3, **asked)
    streamed = [c for e in events for c in e["choices"] if c["logprobs"]]
    assert [entry for c in streamed for entry in c["logprobs"]["content"]] == entries
    text = post(both_entries, "/v1/completions", prompt="<|user|>fox<|end|><|assistant|>", logprobs=2, **asked)
    check(text)
    form, said = text["choices"][0]["logprobs"], text["choices"][0]["text"]
    assert said == choice["message"]["content"]
    assert len(form["tokens"]) == len(form["token_logprobs"]) == len(form["text_offset"]) == len(form["top_logprobs"]) == 40
    assert form["token_logprobs"] == [entry["logprob"] for entry in entries]
    assert all(form["tokens"][i] in form["top_logprobs"][i] for i in range(40))
    ends = [*form["text_offset"][1:], len(said)]
    for token, start, end in zip(form["tokens"], form["text_offset"], ends, strict=True):
        if not token.startswith(("bytes:", "<|")) and "�" not in said[start:end]:
            assert said[start:end] == token
    named = post(
        both_entries,
        "/v1/completions",
        prompt="fox",
        logprobs=1,
        return_tokens_as_token_ids=True,
        **{**asked, "max_tokens": 3},
    )
    told = named["choices"][0]
    assert told["logprobs"]["tokens"] == [f"token_id:{id}" for id in told["token_ids"]]
    assert not any(math.isinf(value) for value in form["token_logprobs"])


def test_an_answer_ends_before_its_stop_string(both_entries: HttpService) -> None:
    asked = {"prompt": "fox fox fox", "temperature": 0, "max_tokens": 40, "logprobs": 0, **LONG}
    whole = post(both_entries, "/v1/completions", **asked)["choices"][0]["text"]
    middle = whole[len(whole) // 2 :][:3]
    for stop in (middle, [middle, "never said"]):
        cut = post(both_entries, "/v1/completions", stop=stop, **asked)["choices"][0]
        assert cut["text"] == whole[: whole.index(middle)]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", middle)
        # Log-probabilities end with the text.
        assert all(offset < len(cut["text"]) for offset in cut["logprobs"]["text_offset"])
    kept = post(both_entries, "/v1/completions", stop=middle, include_stop_str_in_output=True, **asked)["choices"][0]
    assert kept["text"] == whole[: whole.index(middle) + len(middle)]
    events = stream(both_entries, "/v1/completions", stop=middle, include_stop_str_in_output=True, **asked)
    assert content_of(events) == kept["text"]
    assert content_of(stream(both_entries, "/v1/completions", stop=middle, **asked)) == cut["text"]


@pytest.mark.parametrize("interval", [1, 3])
def test_events_of_so_many_tokens(both_entries: HttpService, interval: int) -> None:
    asked = {"messages": FOX, "max_tokens": 20, "temperature": 0, "return_token_ids": True, **LONG}
    whole = post(both_entries, "/v1/chat/completions", **asked)["choices"][0]
    events = stream(both_entries, "/v1/chat/completions", stream_interval=interval, **asked)
    # What remains of a broken character at the very end has no token of its own.
    sizes = [len(c["token_ids"]) for e in events for c in e["choices"] if c.get("token_ids")]
    assert sizes == [interval] * (20 // interval) + [20 % interval] * (20 % interval > 0)
    assert content_of(events) == whole["message"]["content"]


def test_usage_in_streams(both_entries: HttpService) -> None:
    asked = {"prompt": "fox", "max_tokens": 10, "seed": 1, **LONG}
    events = stream(both_entries, "/v1/completions", stream_options={"continuous_usage_stats": True}, **asked)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 10
    asked["prompt"] = "the quick brown fox jumps over the lazy dog " * 6
    first, second = (post(both_entries, "/v1/completions", **asked)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


def test_predicted_answers(client: OpenAI, both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": FOX, "max_tokens": 60, "temperature": 0.0, "extra_body": LONG}
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content or ""
    predicted = client.chat.completions.create(prediction={"type": "content", "content": text}, **asked)
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None and predicted.usage.completion_tokens_details is not None
    details = predicted.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    # How many are accepted depends on the load; the others of the prediction are rejected.
    assert accepted is not None and rejected is not None and accepted + rejected > 40
    assert plain.usage is not None and plain.usage.completion_tokens_details is None
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": "something else"}]
    body = {"messages": FOX, "max_tokens": 60, "temperature": 0, "prediction": {"type": "content", "content": parts}}
    assert post(both_entries, "/v1/chat/completions", **body, **LONG)["choices"][0]["message"]["content"] == text


def test_allowed_tokens_bad_words_salt_and_priority(client: OpenAI, both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"prompt": "fox", "max_tokens": 30, "temperature": 0, "return_token_ids": True, **LONG}
    few = post(both_entries, "/v1/completions", allowed_token_ids=[70, 71, 72], **asked)["choices"][0]
    assert set(few["token_ids"]) <= {70, 71, 72}
    free = post(both_entries, "/v1/completions", **asked)["choices"][0]
    word = post(both_entries, "/detokenize", tokens=free["token_ids"][:1])["prompt"]
    held = post(both_entries, "/v1/completions", bad_words=[word], cache_salt="x", priority=-5, **asked)["choices"][0]
    assert free["token_ids"][0] not in held["token_ids"]
    extra = {"bad_words": [word], "cache_salt": "y", "priority": 7, "speculation": {"strategy": "suffix"}}
    streamed = client.completions.create(
        model="tiny", prompt="fox", max_tokens=30, temperature=0, stream=True, extra_body={**extra, **LONG}
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == held["text"]
    with outrider.Client(both_entries.grpc) as grpc:
        same = grpc.generate("fox", max_tokens=30, ignore_eos=True, bad_words=word, cache_salt="x", priority=-5)
        assert list(same.token_ids) == held["token_ids"]
        only = grpc.generate("fox", max_tokens=30, ignore_eos=True, allowed_token_ids=[70, 71, 72])
        assert list(only.token_ids) == few["token_ids"]
        with refuses(outrider.InvalidArgument, field="cache_salt", value="513 characters"):
            grpc.generate("fox", cache_salt="x" * 513)
        with refuses(outrider.InvalidArgument, field="bad_words", value="300 words"):
            grpc.generate("fox", bad_words=["x"] * 300)


def test_what_harms_nobody_is_accepted(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "fox", "name": None}], max_tokens=2, user="me",  # type: ignore[typeddict-item, list-item]
        metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x", parallel_tool_calls=True, n=None,
        modalities=["text"], verbosity="medium", tool_choice="none", response_format={"type": "text"}, stop=None,
        prompt_cache_key="k", logit_bias={}, top_logprobs=None, logprobs=False, reasoning_effort=None,
        extra_body={"top_k": -1, "priority": 0, "use_beam_search": False, "best_of": None, "cache_salt": None},
    )  # fmt: skip
    assert answer.service_tier == "default"


def test_health_needs_nothing(both_entries: HttpService) -> None:
    for path in ("/health", "/ready"):
        assert CLIENT.get(both_entries.url + path).json() == {"status": "ok"}
    assert CLIENT.get(both_entries.url + "/version").json().keys() == {"version"}
    assert CLIENT.head(both_entries.url + "/health").status_code == 200
