"""The Responses API of a whole service on a tiny model: the tokens of a chat, whole and in events, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.servers.http_service import HttpService, http_served
from tests.servers.responses import CHAT, CLIENT, LONG, PATH, assembled, chat, stream, text_of, whole, without_names
from tests.tiny_models.tiny import make_tiny_model

FOX: list[Any] = [{"role": "user", "content": "fox"}]
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["fox", "dog"]}}, "required": ["at"], "additionalProperties": False},
}  # fmt: skip
CHAT_LOOK = {"type": "function", "function": {name: value for name, value in LOOK.items() if name != "type"}}


@pytest.fixture
def client(both_entries: HttpService) -> Iterator[OpenAI]:
    with OpenAI(base_url=both_entries.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def tokens(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    told = answer if "token_ids" in answer else answer["choices"][0]
    return answer["prompt_token_ids"], told["token_ids"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "seed": 1},
        {"seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 12},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"70": 5}, "seed": 13, "stop": ["\x01"]},
        {"temperature": 0, "seed": 2, "speculation": {"strategy": "autoregressive"}},
    ],
    ids=str,
)
def test_a_response_has_the_tokens_of_a_chat(both_entries: HttpService, sampling: dict[str, Any]) -> None:
    same = chat(both_entries, [{"role": "system", "content": "be brief"}, *FOX], max_tokens=24, **LONG, **sampling)
    asked = {"instructions": "be brief", "max_output_tokens": 24, **LONG, **sampling}
    for given in ("fox", FOX, [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fox"}]}]):
        answer = whole(both_entries, input=given, **asked)
        assert tokens(answer) == tokens(same)
        assert text_of(answer) == same["choices"][0]["message"]["content"]
    events = stream(both_entries, input="fox", **asked)
    assert without_names(events[-1]["response"]) == without_names(answer)
    assert assembled(events) == events[-1]["response"]["output"]
    counts = answer["usage"], same["usage"]
    assert [counts[0][f"{name}_tokens"] for name in ("input", "output", "total")] == [
        counts[1][f"{name}_tokens"] for name in ("prompt", "completion", "total")
    ]
    assert answer["seed"] == same["choices"][0]["seed"]


def test_openais_client(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "fox", "max_output_tokens": 12, "extra_body": {"seed": 3, **LONG}}
    direct = client.responses.create(**asked)
    assert direct.status == "incomplete" and direct.incomplete_details is not None
    assert direct.incomplete_details.reason == "max_output_tokens"
    assert direct.id.startswith("resp_") and direct.max_output_tokens == 12
    kinds = [event.type for event in client.responses.create(stream=True, **asked)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    with client.responses.stream(**asked) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == direct.output_text != ""
    raw = client.responses.with_raw_response.create(**asked, extra_headers={"x-request-id": "mine-8"})
    assert raw.headers["x-request-id"] == "mine-8"


def test_an_answer_that_ends_is_completed(both_entries: HttpService) -> None:
    asked = {"input": "fox", "temperature": 0, "logit_bias": {"2": 0}, "stop_token_ids": list(range(3, 60))}
    answer = whole(both_entries, max_output_tokens=200, **asked)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["completed_at"] >= answer["created_at"]
    assert all(item["status"] == "completed" for item in answer["output"])
    events = stream(both_entries, max_output_tokens=200, **asked)
    assert events[-1]["type"] == "response.completed"


def test_an_answer_without_text_has_an_empty_message(both_entries: HttpService) -> None:
    asked = {"input": "fox", "max_output_tokens": 3, "allowed_token_ids": [1]}
    answer = whole(both_entries, **asked)
    assert [part["text"] for part in answer["output"][0]["content"]] == [""]
    assert assembled(stream(both_entries, **asked))[0]["content"] == answer["output"][0]["content"]


@pytest.mark.parametrize("seed", [1, 2])
def test_log_probabilities_are_those_of_a_chat(both_entries: HttpService, seed: int) -> None:
    same = chat(both_entries, FOX, max_tokens=30, seed=seed, logprobs=True, top_logprobs=2, **LONG)
    entries = same["choices"][0]["logprobs"]["content"]
    for asked in ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2}):
        answer = whole(both_entries, input="fox", max_output_tokens=30, seed=seed, **asked, **LONG)
        told = answer["output"][0]["content"][0]["logprobs"]
        assert [(each["token"], each["logprob"]) for each in told] == [(each["token"], each["logprob"]) for each in entries]
        assert [len(each["top_logprobs"]) for each in told] == [2] * 30 and answer["top_logprobs"] == 2
    events = stream(both_entries, input="fox", max_output_tokens=30, seed=seed, **asked, **LONG)
    deltas = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == told and deltas == told[: len(deltas)]


class Seen(BaseModel):
    animal: Literal["fox", "dog"]
    legs: bool


def test_structured_output(client: OpenAI, both_entries: HttpService) -> None:
    schema = Seen.model_json_schema()
    same = chat(
        both_entries, FOX, max_tokens=200, seed=4, return_token_ids=True,
        response_format={"type": "json_schema", "json_schema": {"name": "Seen", "schema": schema, "strict": True}},
    )  # fmt: skip
    form = {"format": {"type": "json_schema", "name": "Seen", "schema": schema, "strict": True}}
    answer = whole(both_entries, input="fox", max_output_tokens=200, seed=4, text=form, return_token_ids=True)
    assert tokens(answer) == tokens(same) and answer["text"]["format"]["name"] == "Seen"
    parsed = client.responses.parse(
        model="tiny", input="fox", text_format=Seen, max_output_tokens=200, extra_body={"seed": 4}
    ).output_parsed
    assert parsed == Seen.model_validate_json(text_of(answer))
    loose = whole(both_entries, input="fox", max_output_tokens=200, seed=4, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(text_of(loose)), dict)
    choice = whole(both_entries, input="fox", structured_outputs={"choice": ["yes", "no"]})
    assert text_of(choice) in ("yes", "no")


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    """A service whose context has room for tools."""
    folder = make_tiny_model(tmp_path_factory.mktemp("roomy"), max_position_embeddings=2048)
    with http_served(folder, "verifier.max_model_len=2048") as service:
        yield service


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_calls_of_tools_and_back(roomy: HttpService, choice: Any) -> None:
    chosen = choice if isinstance(choice, str) else {"type": "function", "function": {"name": "look"}}
    same = chat(
        roomy,
        FOX,
        tools=[CHAT_LOOK],
        tool_choice=chosen,
        parallel_tool_calls=False,
        seed=5,
        max_tokens=100,
        return_token_ids=True,
    )
    asked: dict[str, Any] = {
        "tools": [LOOK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 5,
        "max_output_tokens": 100,
        "return_token_ids": True,
    }
    answer = whole(roomy, input="fox", **asked)
    assert tokens(answer) == tokens(same)
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    told = same["choices"][0]["message"]["tool_calls"]
    assert [(each["name"], each["arguments"]) for each in calls] == [
        (each["function"]["name"], each["function"]["arguments"]) for each in told
    ]
    events = stream(roomy, input="fox", **asked)
    assert without_names(events[-1]["response"]) == without_names(answer)
    assert assembled(events) == events[-1]["response"]["output"]
    # What the function says, goes back; the same conversation at the chat door has the same tokens.
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "a fox"} for call in calls]
    results = [{"role": "tool", "tool_call_id": call["call_id"], "content": "a fox"} for call in calls]
    spoken = {"role": "assistant", "content": None, "tool_calls": [
        {"id": call["call_id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls
    ]}  # fmt: skip
    after = chat(roomy, [*FOX, spoken, *results], seed=6, max_tokens=12, **LONG)
    more = {"seed": 6, "max_output_tokens": 12, **LONG}
    by_items = whole(roomy, input=[*FOX, *answer["output"], *outputs], **more)
    by_name = whole(roomy, input=outputs, previous_response_id=answer["id"], **more)
    references = [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
    by_reference = whole(roomy, input=[*FOX, *references, *outputs], **more)
    assert tokens(by_items) == tokens(by_name) == tokens(by_reference) == tokens(after)


def test_a_conversation_goes_on(both_entries: HttpService) -> None:
    asked = {"seed": 7, "max_output_tokens": 8, **LONG}
    first = whole(both_entries, input="fox", instructions="be brief", **asked)
    second = whole(both_entries, input="dog", previous_response_id=first["id"], **asked)
    third = whole(both_entries, input="cow", previous_response_id=second["id"], **asked)
    assert (second["previous_response_id"], second["instructions"]) == (first["id"], None)
    spoken: list[Any] = []
    # Instructions are not handed on.
    for said, answer in (("fox", first), ("dog", second), ("cow", third)):
        spoken.append({"role": "user", "content": said})
        if answer is not first:
            same = chat(both_entries, spoken, seed=7, max_tokens=8, **LONG)
            assert tokens(same) == tokens(answer)
        spoken.append({"role": "assistant", "content": text_of(answer)})
    # One answer may be continued twice.
    again = whole(both_entries, input="dog", previous_response_id=first["id"], **asked)
    assert tokens(again) == tokens(second)
    streamed = stream(both_entries, input="dog", previous_response_id=first["id"], **asked)
    assert tokens(streamed[-1]["response"]) == tokens(second)
    after = whole(both_entries, input="cow", previous_response_id=streamed[-1]["response"]["id"], **asked)
    assert tokens(after) == tokens(third)


def test_the_oldest_turns_of_a_long_conversation_are_left_out(both_entries: HttpService) -> None:
    turns = [{"role": role, "content": f"{index} {'fox ' * 20}"} for index in range(10) for role in ("user", "assistant")]
    asked = {"instructions": "be brief", "max_output_tokens": 8, "seed": 1, **LONG}
    spoken = [*turns, *FOX]
    refused = CLIENT.post(both_entries.url + PATH, json={"input": spoken, **asked}).json()["error"]
    assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
    answer = whole(both_entries, input=spoken, truncation="auto", **asked)
    assert answer["truncation"] == "auto"
    # As many turns as there is room for.
    lengths = {}
    for dropped in range(0, len(turns), 2):
        text = CLIENT.post(
            both_entries.url + "/tokenize",
            json={"messages": [{"role": "system", "content": "be brief"}, *turns[dropped:], *FOX]},
        ).json()
        lengths[dropped] = text.get("count", 1 << 20)
    dropped = min(each for each, length in lengths.items() if length <= 512 - 8)
    assert dropped > 0
    assert tokens(answer) == tokens(whole(both_entries, input=spoken[dropped:], **asked))
    # What fits is left as it is.
    short = whole(both_entries, input=turns[:2] + FOX, truncation="auto", **asked)
    assert tokens(short) == tokens(whole(both_entries, input=turns[:2] + FOX, **asked))


def test_what_asks_for_nothing_is_taken(both_entries: HttpService) -> None:
    answer = whole(
        both_entries, model="tiny", input=[{"role": "user", "content": "fox", "id": None, "status": "completed"}], max_output_tokens=2,
        background=False, conversation=None, context_management=[], prompt=None, include=["reasoning.encrypted_content"],
        max_tool_calls=3, metadata={"a": "b"}, parallel_tool_calls=True, prompt_cache_key="k", safety_identifier="s",
        reasoning={"effort": None, "summary": "auto"}, service_tier="auto", store=True, stream=False, text={"verbosity": "medium"},
        tool_choice="auto", tools=[], top_logprobs=0, truncation="disabled", user="u", n=1, instructions=None, temperature=None,
    )  # fmt: skip
    assert (answer["metadata"], answer["user"], answer["service_tier"]) == ({"a": "b"}, "u", "default")


def test_what_the_template_does_not_read_is_named(both_entries: HttpService) -> None:
    for streams in (False, True):
        body = {"input": "fox", "max_output_tokens": 2, "reasoning": {"effort": "high"}, "stream": streams}
        answer = CLIENT.post(both_entries.url + PATH, json=body)
        assert answer.status_code == 200 and answer.headers["x-outrider-ignored"] == "reasoning.effort"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\r\nx-evil: 1", "chat_template_kwargs.a x-evil: 1"),
        ("\x00é東", "chat_template_kwargs. \\xe9\\u6771"),
        ("." * 300_000, f"chat_template_kwargs{'.' * 477}..."),
    ],
    ids=["line end", "other characters", "long"],
)
def test_names_of_any_characters_are_told_in_a_header(
    both_entries: HttpService, name: str, shown: str, streams: bool
) -> None:
    for path, asked in ((PATH, {"input": "fox", "max_output_tokens": 1}), (CHAT, {"messages": FOX, "max_tokens": 1})):
        body = {**asked, "stream": streams, "chat_template_kwargs": {name: 1}}
        answer = CLIENT.post(both_entries.url + path, json=body)
        assert (answer.status_code, answer.headers["x-outrider-ignored"]) == (200, shown)
        assert "x-evil" not in answer.headers


def test_thoughts_that_the_template_does_not_read_are_named(both_entries: HttpService) -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    spoken = [*FOX, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    asked = {"max_output_tokens": 4, "seed": 1, **LONG}
    answer = CLIENT.post(both_entries.url + PATH, json={"input": [spoken[0], thought, *spoken[1:]], **asked})
    assert answer.headers["x-outrider-ignored"] == "input[].content"
    assert tokens(answer.json()) == tokens(whole(both_entries, input=spoken, **asked))


def test_where_tokens_come_from(both_entries: HttpService) -> None:
    asked = {"input": "fox", "max_output_tokens": 10, "seed": 1, "speculation": {"report": "sources"}, **LONG}
    answer = whole(both_entries, **asked)
    assert [each["id"] for each in answer["speculation"]["tokens"]] == answer["token_ids"]
    assert "".join(each["text"] for each in answer["speculation"]["tokens"]) == text_of(answer)
