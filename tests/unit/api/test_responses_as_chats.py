"""What a body of the Responses API asks for, as that of a chat: each field, and each kind of item."""

from __future__ import annotations

import json
from typing import Any

from services.api.http.openai.request import Asked
from services.api.http.responses.chat_body import ask, read_create
from services.api.messages import ChatMessage
from speculation.types import StructuredOutputs
from tests.unit.api.test_fields_arrive import check

BODY: dict[str, Any] = {"input": "a"}


def read(body: dict[str, Any]) -> Asked:
    return ask(read_create(body), (), lambda _: None).asked


def test_each_field_arrives() -> None:
    schema = {"type": "integer"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    held = StructuredOutputs(kind="json", text=json.dumps(schema))
    for given, wanted, sampled in (
        ({"max_output_tokens": 9}, {}, {"max_tokens": 9}),
        ({"temperature": 0.5, "top_p": 0.9, "seed": 3}, {"seed": 3}, {"temperature": 0.5, "top_p": 0.9}),
        ({"stop": ["x"], "logit_bias": {"5": 1}}, {}, {"stop": ("x",), "logit_bias": {5: 1.0}}),
        ({"top_logprobs": 2}, {"top_logprobs": 2}, {"logprobs": 2}),
        ({"top_logprobs": 0}, {}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 0}, {"logprobs": 0}),
        ({"truncation": "auto"}, {"drops_oldest": True}, {}),
        ({"truncation": "disabled"}, {}, {}),
        (
            {"text": {"format": form}},
            {"form_field": "response_format.json_schema.schema"},
            {"structured_outputs": held},
        ),
        ({"speculation": {"strategy": "suffix"}}, {"strategy": "suffix"}, {}),
    ):
        check(read, BODY, given, wanted, sampled)
    assert read(BODY).length_field == "max_completion_tokens"
    assert read({**BODY, "reasoning": {"effort": "low"}}).chat.template_kwargs == '{"reasoning_effort": "low"}'
    streamed = read({**BODY, "stream": True, "stream_options": {"include_obfuscation": False}}).stream
    assert streamed is not None and streamed.include_obfuscation is False and read(BODY).stream is None


def test_tools_and_their_choice_arrive() -> None:
    tools = [
        {"type": "function", "name": "look", "description": "sees", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "go", "parameters": None},
    ]
    for choice, mode, called, allowed in (
        ("auto", "auto", "", ()),
        ("required", "required", "", ()),
        ({"type": "function", "name": "go"}, "named", "go", ()),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]},
            "required",
            "",
            ("go",),
        ),
    ):
        used = read({**BODY, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}).tools
        assert used is not None and not used.several and used.strict == {"look": "tools[0].function.strict"}
        assert (used.mode, used.called, used.allowed) == (mode, called, allowed)
        assert used.schemas == {"look": {"type": "object"}, "go": {"type": "object", "properties": {}}}
        assert [each["function"].get("description") for each in json.loads(used.shown)] == ["sees", None]
    assert read({**BODY, "tools": tools, "tool_choice": "none"}).tools is None


def test_what_the_assistant_thought_said_and_called_is_one_message() -> None:
    call: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"x": 1}'}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        call,
        {**call, "call_id": "2", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "y"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "z"}]},
        # Thoughts behind a call, and a second text, begin another one.
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "i"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    before = [{"role": "user", "content": "earlier"}]
    asked = ask(read_create({"input": items, "instructions": "briefly"}), before, lambda _: None)
    (said,) = asked.asked.inputs
    assert isinstance(said[3], ChatMessage)
    assert [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in json.loads(said[3].tool_calls)] == [
        ("1", "look", {"x": 1}), ("2", "look", {}),
    ]  # fmt: skip
    assert said == (
        ChatMessage(role="system", content="briefly"),
        ChatMessage(role="user", content="earlier"),
        ChatMessage(role="user", content="a\nb"),
        ChatMessage(role="assistant", content="c", reasoning="h", tool_calls=said[3].tool_calls),
        ChatMessage(role="tool", content="y", tool_call_id="1"),
        ChatMessage(role="tool", content="z", tool_call_id="2"),
        ChatMessage(role="assistant", content="d", reasoning="i"),
        ChatMessage(role="assistant", content="e"),
        ChatMessage(role="user", content="f"),
    )
    assert json.loads(asked.context) == [*before, *items]
    for field, own in (
        ("messages[0].content", "instructions"),
        ("messages[1].content", "previous_response_id"),
        ("messages[2].content[1].text", "input[0].content[1].text"),
        ("messages[3].reasoning_content", "input[1].content"),
        ("messages[3].content", "input[2].content"),
        ("messages[3].tool_calls[1].function.arguments", "input[4].arguments"),
        ("messages[3].tool_calls[1].id", "input[4].call_id"),
        ("messages[4].content", "input[5].output"),
        ("messages[4].tool_call_id", "input[5].call_id"),
        ("messages[6].reasoning_content", "input[7].summary"),
    ):
        assert asked.names.of(field) == own
