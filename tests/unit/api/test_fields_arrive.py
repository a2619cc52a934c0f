"""Each field of a body arrives where the router reads it, and changes nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from services.api.http.llama_server.request import read_infill
from services.api.http.messages.reading import read_message
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.protocol.completion_body import MAX_PROMPTS
from services.api.http.openai.request import Asked
from services.api.messages import ChatMessage, Infill, RequestedSampling
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.types import StructuredOutputs

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
INFILL: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b"}
Read = Callable[[dict[str, Any]], Asked]

# Of sampling: a field, a value, and what arrives under the field's own name or another.
SAMPLING: list[tuple[str, Any, Any]] = [
    ("temperature", 0.5, 0.5), ("temperature", 0.1 * limits.MIN_TEMPERATURE, 0.0), ("top_p", 0.9, 0.9), ("top_p", 0, 1e-9),
    ("top_k", 7, 7), ("top_k", -1, 0), ("min_p", 0.25, 0.25), ("presence_penalty", 0.5, 0.5), ("frequency_penalty", -0.5, -0.5),
    ("ignore_eos", True, True), ("stop", ["x", "y"], ("x", "y")),
]  # fmt: skip
MORE_SAMPLING: list[tuple[str, Any, Any]] = [
    ("repetition_penalty", 1.5, 1.5), ("min_tokens", 3, 3), ("ignore_generation_config", True, True), ("stop", "x", ("x",)),
    ("stop_token_ids", [4, 5], (4, 5)), ("logit_bias", {"5": 1, "6": -0.5}, {5: 1.0, 6: -0.5}), ("bad_words", ["x"], ("x",)),
    ("allowed_token_ids", [4], (4,)), ("max_tokens", 9, 9),
]  # fmt: skip
# Of everything else: a body's fields, and what arrives.
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": "m"}, {"model": "m"}),
    ({"privacy": "strict"}, {"private": True}),
    ({"privacy": "none"}, {"private": False}),
    ({"cache_salt": "s"}, {"cache_salt": "s"}),
    ({"seed": 5}, {"seed": 5}),
    ({"speculation": {"strategy": "suffix", "num_speculative_tokens": 4, "acceptance": "rejection", "effort": "paper"}},
     {"strategy": "suffix", "num_speculative_tokens": 4, "acceptance": "rejection", "effort": "paper"}),
    ({"speculation": {"sources": ["suffix"], "drafter": "d", "group": "g", "report": "trees", "compare": ["a", "b"]}},
     {"sources": ("suffix",), "drafter": "d", "group": "g", "report": "trees", "compare": ("a", "b")}),
]  # fmt: skip
MORE_OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"n": 2}, {"n": 2}),
    ({"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}},
     {"prediction": "ab"}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"stream_interval": 3}, {"stream_interval": 3}),
    ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, {"truncate": -1, "truncates_end": True}),
    ({"truncation_side": "left"}, {}),
    ({"priority": -3}, {"priority": -3}),
    ({"include_stop_str_in_output": True}, {"include_stop": True}),
    ({"return_token_ids": True}, {"return_token_ids": True}),
    ({"return_tokens_as_token_ids": True}, {"tokens_as_ids": True}),
    ({"request_id": "mine"}, {"request_id": "mine"}),
]  # fmt: skip


def check(read: Read, body: dict[str, Any], given: dict[str, Any], wanted: dict[str, Any], sampled: dict[str, Any]) -> None:
    """With these fields the body asks for what is wanted, and else for what it asks for without them."""
    before, after = read(body), read({**body, **given})
    names = {each.name for each in fields(Asked)} - {"sampling"}
    assert {name: getattr(after, name) for name in names} == {name: getattr(before, name) for name in names} | wanted
    own = [each.name for each in fields(RequestedSampling)]
    plain = {name: getattr(before.sampling, name) for name in own}
    assert {name: getattr(after.sampling, name) for name in own} == plain | sampled


def read_gap(body: dict[str, Any]) -> Asked:
    return read_infill(body)[0]


@pytest.mark.parametrize(("read", "body"), [(read_chat, CHAT), (read_completion, {"prompt": "a"}), (read_gap, INFILL)])
def test_fields_of_all_bodies(read: Read, body: dict[str, Any]) -> None:
    for name, value, arrives in SAMPLING:
        check(read, body, {name: value}, {}, {name: arrives})
    for given, wanted in OTHERS:
        check(read, body, given, wanted, {})


@pytest.mark.parametrize(("read", "body"), [(read_chat, CHAT), (read_completion, {"prompt": "a"})])
def test_fields_of_both_of_openais(read: Read, body: dict[str, Any]) -> None:
    for name, value, arrives in MORE_SAMPLING:
        check(read, body, {name: value}, {}, {name: arrives})
    for given, wanted in MORE_OTHERS:
        check(read, body, given, wanted, {})
    check(read, body, {"prompt_logprobs": 2}, {"prompt_logprobs": 2}, {"prompt_logprobs": 2})


def test_fields_of_chats() -> None:
    for given, wanted, sampled in (
        ({"max_completion_tokens": 9}, {"length_field": "max_completion_tokens"}, {"max_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 9}, {"length_field": "max_completion_tokens"}, {"max_tokens": 9}),
        ({"logprobs": True}, {"top_logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, {}, {}),
        ({"include_reasoning": False}, {"thoughts": False}, {}),
        ({"service_tier": "auto"}, {"tier": True}, {}),
        ({"metadata": {"a": "b"}}, {"metadata": {"a": "b"}}, {}),
    ):
        check(read_chat, CHAT, given, wanted, sampled)
    plain = read_chat(CHAT).chat
    assert (plain.template_kwargs, plain.add_generation_prompt, plain.continue_final_message) == ("", True, False)
    asked = read_chat(
        {**CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"mood": "fine"}, "add_generation_prompt": False}
    )
    assert (
        asked.chat.template_kwargs == '{"reasoning_effort": "low", "mood": "fine"}' and not asked.chat.add_generation_prompt
    )
    begun = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "b"}], "continue_final_message": True}
    assert read_chat(begun).chat.continue_final_message and not read_chat(begun).chat.add_generation_prompt


def test_a_form_of_calls_and_one_of_text_go_together_and_others_do_not() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    called = {**CHAT, "tools": tools, "tool_choice": "required"}
    both = read_chat({**called, "response_format": {"type": "json_object"}})
    assert both.form_field == "tools" and both.text_form == StructuredOutputs(kind="json_object")
    assert both.text_form_field == "response_format"
    with pytest.raises(InvalidArgument) as refused:
        read_chat({**called, "structured_outputs": {"regex": "a"}})
    assert refused.value.field == "tool_choice"
    for free in ({**called, "tool_choice": "auto"}, CHAT):
        assert read_chat({**free, "structured_outputs": {"regex": "a"}}).form_field == "structured_outputs.regex"


def test_fields_of_texts() -> None:
    body = {"prompt": "a"}
    for given, wanted, sampled in (
        ({"logprobs": 2}, {"top_logprobs": 2}, {"logprobs": 2}),
        ({"echo": True}, {"echo": True}, {}),
        ({"echo": True, "logprobs": 2}, {"echo": True, "top_logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
        ({"suffix": "b"}, {"infill": Infill(suffix="b")}, {}),
        ({"max_tokens": 0}, {"answers": False}, {"max_tokens": 1}),
        ({"prompt": [[5, 6], [7]]}, {"inputs": ((5, 6), (7,))}, {}),
    ):
        check(read_completion, body, given, wanted, sampled)


def test_as_many_answers_as_may_be_and_no_more() -> None:
    half = MAX_PROMPTS // 2
    assert len(read_completion({"prompt": ["a"] * half, "n": 2}).inputs) == half
    assert len(read_completion({"prompt": [[5]] * MAX_PROMPTS}).inputs) == MAX_PROMPTS
    for field, body in (("n", {"prompt": ["a"] * (half + 1), "n": 2}), ("prompt", {"prompt": ["a"] * (MAX_PROMPTS + 1)})):
        with pytest.raises(InvalidArgument) as refused:
            read_completion(body)
        assert refused.value.field == field


def test_fields_of_gaps() -> None:
    files = [{"filename": "x.py", "text": "1"}, {"text": "2"}]
    for given, wanted, sampled in (
        ({"n_predict": 9}, {}, {"max_tokens": 9}),
        ({"n_predict": -1, "seed": -1}, {}, {}),
        ({"n_predict": 0}, {"answers": False}, {"max_tokens": 1}),
        ({"repeat_penalty": 1.5}, {}, {"repetition_penalty": 1.5}),
        ({"return_tokens": True}, {"return_token_ids": True}, {}),
        ({"prompt": "c"}, {"inputs": ("ac",)}, {}),
        ({"input_extra": files}, {"infill": Infill(suffix="b", files=(("x.py", "1"), ("tmp", "2")))}, {}),
    ):
        check(read_gap, INFILL, given, wanted, sampled)
    plain = read_gap(INFILL)
    assert (plain.inputs, plain.infill, plain.default_max_tokens) == (("a",), Infill(suffix="b"), None)
    assert plain.length_field == "n_predict"


def read_anthropics(body: dict[str, Any]) -> Asked:
    return read_message(body).asked


def test_fields_of_messages() -> None:
    body = {**CHAT, "max_tokens": 5}
    for name, value, arrives in (*SAMPLING, *MORE_SAMPLING):
        check(
            read_anthropics,
            body,
            {"stop_sequences" if name == "stop" else name: [value] if value == "x" else value},
            {},
            {name: arrives},
        )
    only_chats = {
        "n",
        "truncation_side",
        "truncate_prompt_tokens",
        "include_stop_str_in_output",
        "return_tokens_as_token_ids",
    }
    for given, wanted in (*OTHERS, *MORE_OTHERS):
        if not only_chats & given.keys():
            check(read_anthropics, body, given, wanted, {})
    plain = read_anthropics(body)
    assert plain.clips_length and plain.answers and plain.stream is None and read_anthropics({**body, "stream": True}).stream
    check(read_anthropics, body, {"max_tokens": 0}, {"answers": False}, {"max_tokens": 1})
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    asked = read_anthropics({**body, "output_config": {"effort": "low", "format": form}, "chat_template_kwargs": {"a": 1}})
    assert asked.chat.template_kwargs == '{"reasoning_effort": "low", "a": 1}'
    assert asked.sampling.structured_outputs == StructuredOutputs(kind="json", text='{"type": "integer"}')


def test_a_conversation_of_anthropics_is_that_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h"}, {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "1", "name": "look", "input": {"x": 1}}, {"type": "tool_use", "id": "2", "name": "go", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "z"}]},
            {"type": "text", "text": "d"},
        ]},
        {"role": "assistant", "content": ""},
    ]  # fmt: skip
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    tools = [
        {"name": "look", "description": "sees", "input_schema": {"type": "object"}, "strict": True},
        {"name": "go", "input_schema": {}},
    ]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    read = read_message({"max_tokens": 5, "system": system, "messages": messages, "tools": tools, "tool_choice": choice})
    said = read.asked.inputs[0]
    assert isinstance(said[2], ChatMessage)
    assert json.loads(said[2].tool_calls) == [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "go", "arguments": {}}},
    ]
    assert said == (
        ChatMessage(role="system", content="s\nt"), ChatMessage(role="user", content="a\nb"),
        ChatMessage(role="assistant", content="c", reasoning="h", tool_calls=said[2].tool_calls),
        ChatMessage(role="tool", content="Error: no", tool_call_id="1"), ChatMessage(role="tool", content="y\nz", tool_call_id="2"),
        ChatMessage(role="user", content="d"),
    )  # fmt: skip
    assert read.paths == (
        "system", "messages[0].content", "messages[2].content", "messages[3].content[0].content",
        "messages[3].content[1].content", "messages[3].content",
    )  # fmt: skip
    used = read.asked.tools
    assert used is not None and (used.mode, used.several, used.strict) == (
        "required",
        False,
        {"look": "tools[0].function.strict"},
    )
    assert used.schemas == {"look": {"type": "object"}, "go": {}}
    assert [each["function"].get("description") for each in json.loads(used.shown)] == ["sees", None]
    body = {"max_tokens": 5, "messages": messages, "tools": tools}
    for chosen, mode, called in (
        ({"type": "auto"}, "auto", ""),
        ({"type": "any"}, "required", ""),
        ({"type": "tool", "name": "go"}, "named", "go"),
    ):
        used = read_anthropics({**body, "tool_choice": chosen}).tools
        assert used is not None and (used.mode, used.called, used.several) == (mode, called, True)
    assert read_anthropics({**body, "tool_choice": {"type": "none"}}).tools is None


@pytest.mark.parametrize(("role", "kept"), [("assistant", 1), ("user", 2)])
def test_an_empty_last_message_of_the_assistant_alone_asks_for_nothing(role: str, kept: int) -> None:
    other = "user" if role == "assistant" else "assistant"
    messages = [{"role": other, "content": "a"}, {"role": role, "content": ""}]
    assert len(read_anthropics({"max_tokens": 5, "messages": messages}).inputs[0]) == kept
