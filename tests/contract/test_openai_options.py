"""Options of OpenAI's API, beside those that ask for an answer: how a prompt is made and cut, special tokens, extreme values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.test_openai_calls import CLIENT, FOX, LONG, post
from tests.servers.http_service import HttpService
from tests.servers.openai_types import check


def test_conversations_are_rendered_as_asked(both_entries: HttpService) -> None:
    def ids(messages: list[Any], **more: Any) -> str:
        tokens = post(both_entries, "/tokenize", messages=messages, return_token_strs=True, **more)
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        return "".join(tokens["token_strs"])

    assert ids(FOX) == "<|user|>fox<|end|><|assistant|>"
    assert ids(FOX, add_generation_prompt=False) == "<|user|>fox<|end|>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ids([{"role": "developer", "content": parts}, *FOX]) == "<|system|>a\nb<|end|><|user|>fox<|end|><|assistant|>"
    begun = [*FOX, {"role": "assistant", "content": "The quick "}]
    assert ids(begun, continue_final_message=True) == "<|user|>fox<|end|><|assistant|>The quick "
    # An answer can be sent back as it came.
    answer = post(both_entries, "/v1/chat/completions", messages=FOX, max_tokens=3, seed=1)["choices"][0]["message"]
    assert post(both_entries, "/v1/chat/completions", messages=[*FOX, answer, *FOX], max_tokens=3)["choices"]
    cut = post(both_entries, "/v1/completions", prompt="fox " * 400, truncate_prompt_tokens=7, echo=False)
    assert cut["usage"]["prompt_tokens"] == 7
    most = post(both_entries, "/v1/completions", prompt="fox " * 400, truncate_prompt_tokens=-1, max_tokens=10, **LONG)
    assert most["usage"]["total_tokens"] == 512


def test_special_tokens_are_shown_where_that_is_asked_for(both_entries: HttpService) -> None:
    asked = {"prompt": "fox", "max_tokens": 12, "temperature": 0, "logit_bias": {"1": 100}, "return_token_ids": True}
    hidden = post(both_entries, "/v1/completions", **asked)["choices"][0]
    shown = post(both_entries, "/v1/completions", skip_special_tokens=False, **asked)["choices"][0]
    assert hidden["token_ids"] == shown["token_ids"] == [1] * 12
    assert hidden["text"] == "" and shown["text"] == "<|user|>" * 12


def test_tokens_there_and_back(both_entries: HttpService) -> None:
    for text in ("the quick brown fox", "Größe 東京 🙂🙃"):
        tokens = post(both_entries, "/tokenize", prompt=text, model="tiny")
        assert tokens["max_model_len"] == 512 and tokens["token_strs"] is None
        assert post(both_entries, "/detokenize", tokens=tokens["tokens"]) == {"prompt": text}
        # This tokenizer adds none.
        assert post(both_entries, "/tokenize", prompt=text, add_special_tokens=False) == tokens
    chat = post(both_entries, "/tokenize", messages=FOX)["tokens"]
    rendered = "<|user|>fox<|end|><|assistant|>"
    assert post(both_entries, "/detokenize", tokens=chat) == {"prompt": rendered}
    asked = {"echo": True, "max_tokens": 1, "seed": 1}
    echoed = [post(both_entries, "/v1/completions", prompt=each, **asked)["choices"][0]["text"] for each in (chat, rendered)]
    assert echoed[0] == echoed[1] and echoed[0].startswith(rendered)


ASKS_FOR_NOTHING: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tool_choice": "auto"},
    {"tool_choice": "none"},
    {"best_of": 1},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": False},
    {"guided_decoding_backend": "auto", "guided_json": None},
    {"messages": [*FOX, {"role": "assistant", "content": None}, *FOX]},
    {"messages": [*FOX, {"role": "assistant", "content": "b", "reasoning_content": "", "refusal": ""}, *FOX]},
    {"messages": [{"role": "user", "id": "x", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": None,
                   "content": [{"type": "text", "text": "fox", "cache_control": {"type": "ephemeral"}}]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", ASKS_FOR_NOTHING, ids=range(len(ASKS_FOR_NOTHING)))
def test_what_asks_for_nothing_changes_nothing(both_entries: HttpService, body: dict[str, Any]) -> None:
    plain = {"messages": FOX, "max_tokens": 8, "temperature": 0, "seed": 1}
    answer = post(both_entries, "/v1/chat/completions?api-version=2024-10-21", **{**plain, **body})
    check(answer)
    if "messages" not in body:
        assert answer["choices"] == post(both_entries, "/v1/chat/completions", **plain)["choices"]


def test_what_the_template_does_not_read_is_named(both_entries: HttpService) -> None:
    asked = {
        "messages": FOX,
        "max_tokens": 2,
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for stream in (False, True):
        answer = CLIENT.post(f"{both_entries.url}/v1/chat/completions", json={**asked, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-outrider-ignored"] == "reasoning_effort, chat_template_kwargs.enable_thinking"
    plain = CLIENT.post(f"{both_entries.url}/v1/chat/completions", json={"messages": FOX, "max_tokens": 2})
    assert "x-outrider-ignored" not in plain.headers


def test_extreme_values_have_a_right_answer(both_entries: HttpService) -> None:
    def said(**sampling: Any) -> str:
        asked = {"messages": FOX, "max_tokens": 12, "ignore_eos": True, "seed": 5, **sampling}
        return str(post(both_entries, "/v1/chat/completions", **asked)["choices"][0]["message"]["content"])

    greedy = said(temperature=0)
    assert said(temperature=1e-9) == said(temperature=0.0005) == said(temperature=1, top_p=0) == greedy
    assert said(temperature=1) != greedy


def test_older_names_of_forms(both_entries: HttpService) -> None:
    for name, value in (
        ("regex", "[ab]{3}"),
        ("choice", ["aaa", "bbb"]),
        ("json", {"type": "integer", "maximum": 9, "minimum": 0}),
    ):
        old, new = (
            post(both_entries, "/v1/chat/completions", **{"messages": FOX, "seed": 1, "max_tokens": 30, **form})["choices"][
                0
            ]
            for form in ({f"guided_{name}": value}, {"structured_outputs": {name: value}})
        )
        assert old["message"] == new["message"]


def test_which_side_of_a_prompt_is_cut(both_entries: HttpService) -> None:
    for side, kept in (("left", [7, 8]), ("right", [5, 6])):
        body = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
        (choice,) = post(both_entries, "/v1/completions", max_tokens=1, **body)["choices"]
        assert choice["prompt_token_ids"] == kept
