"""Thoughts and calls over HTTP, as each kind of model writes them: whole and streamed, sent back, cut short, under a form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.api.config import HttpConfig
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.model_fit import readable
from services.tool_formats.catalogue import FORMATS, NAMES
from services.tool_formats.harmony import MARKS
from services.tool_formats.marks import Marks
from speculation.types import FinishReason
from tests.contract.test_openai_streams import CHAT, FOX, openai_client, served
from tests.servers.openai_types import check, events_of
from tests.servers.scripted_router import ScriptedRouter
from tests.unit.api.test_answer_text import LOOKED, WRITTEN

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
F: Any = {"type": "function", "function": {"name": "f"}}
THOUGHT = "<think>\nA fox?\nSo 京.\n</think>\n\nYes. "
HARMONY = "<|channel|>analysis<|message|>A fox?<|end|><|start|>assistant<|channel|>"


def numbered(marks: tuple[str, ...]) -> dict[str, int]:
    """Ids of special tokens, behind those of bytes."""
    return {mark: 256 + number for number, mark in enumerate(marks)}


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make, and how it ends."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["calls"]):
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["ends"] = choice["finish_reason"]
    return message


def whole_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that comes whole."""
    choice = answer["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())],
        "ends": choice["finish_reason"],
    }


async def told(router: ScriptedRouter, **body: Any) -> dict[str, Any]:
    """What an answer says; streamed, it says the same."""
    async with served(router) as (client, _):
        asked = {"messages": FOX, **body}
        answer = (await client.post(CHAT, json=asked)).json()
        check(answer)
        events = events_of((await client.post(CHAT, json={**asked, "stream": True})).text)
        for event in events:
            check(event)
        assert joined(events) == whole_of(answer)
        return whole_of(answer)


@pytest.mark.parametrize("pieces", [1, 7, 999])
async def test_thoughts_are_told_apart_and_counted(pieces: int) -> None:
    router = ScriptedRouter(THOUGHT, pieces).with_card(thoughts="think")
    said = {"content": "Yes. ", "reasoning_content": "A fox?\nSo 京.", "calls": [], "ends": "stop"}
    assert await told(router) == said
    assert await told(router, include_reasoning=False) == {**said, "reasoning_content": ""}
    async with served(router) as (client, server):
        usage = (await client.post(CHAT, json={"messages": FOX})).json()["usage"]
        # Bytes: the mark that begins the thought may be seen at its end alone.
        thought = len(THOUGHT.partition("</think>")[0].encode()) + len("</think>")
        assert thought - len("<think>") <= usage["completion_tokens_details"]["reasoning_tokens"] <= thought
        stream = await openai_client(server).chat.completions.create(model="scripted", messages=FOX, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "A fox?\nSo 京."
    # Not of a model that does not mark its thoughts.
    assert (await told(ScriptedRouter(THOUGHT, pieces)))["content"] == THOUGHT


async def test_thoughts_between_special_tokens() -> None:
    router = ScriptedRouter("[THINK]A [THINK fox?[/THINK]Yes.", 4).with_card(
        thoughts="bracketed_think", special_tokens=numbered(("[THINK]", "[/THINK]"))
    )
    assert await told(router) == {"content": "Yes.", "reasoning_content": "A [THINK fox?", "calls": [], "ends": "stop"}


async def test_a_thought_that_the_prompt_begins() -> None:
    begun = [{"role": "user", "content": "fox <think>\n"}]
    router = ScriptedRouter("A fox?</think>\nYes.").with_card(thoughts="think")
    assert await told(router, messages=begun) == {
        "content": "Yes.",
        "reasoning_content": "A fox?",
        "calls": [],
        "ends": "stop",
    }
    router.text, router.reason = "A fox", FinishReason.LENGTH
    assert await told(router, messages=begun) == {
        "content": "",
        "reasoning_content": "A fox",
        "calls": [],
        "ends": "length",
    }
    continued = [*FOX, {"role": "assistant", "content": "<think>A "}]
    router.text, router.reason = "fox?</think>Yes.", FinishReason.STOP
    continues = {"messages": continued, "continue_final_message": True, "add_generation_prompt": False}
    assert (await told(router, **continues))["reasoning_content"] == "fox?"


@pytest.mark.examples(4)
@pytest.mark.parametrize("form", NAMES)
async def test_calls_of_every_form(form: str) -> None:
    marks = MARKS if form == "harmony" else FORMATS[form](Marks()).marks
    for special in ({}, numbered(marks)):
        router = ScriptedRouter(WRITTEN[form][0], 5).with_card(tool_format=form, special_tokens=special)
        said = await told(router, tools=[LOOK, F])
        assert said == {"content": "", "reasoning_content": "", "calls": [["look", LOOKED[2]]], "ends": "tool_calls"}


async def test_calls_in_harmony_behind_thoughts() -> None:
    text = f'{HARMONY}commentary to=functions.look <|constrain|>json<|message|>{{"a": "b"}}<|call|>'
    router = ScriptedRouter(text, 3).with_card(tool_format="harmony", thoughts="harmony", special_tokens=numbered(MARKS))
    said = await told(router, tools=[LOOK])
    assert said == {"content": "", "reasoning_content": "A fox?", "calls": [["look", '{"a": "b"}']], "ends": "tool_calls"}
    router.text = f"{HARMONY}final<|message|>Yes."
    assert (await told(router))["content"] == "Yes."


async def test_letters_of_a_mark_are_text_where_it_is_a_token() -> None:
    special = {"[TOOL_CALLS]": 256}
    router = ScriptedRouter('Say [TOOL_CALLS][{"name": "f", "arguments": {}}]').with_card(
        tool_format="mistral", special_tokens=special
    )
    assert (await told(router, tools=[F]))["calls"] == [["f", "{}"]]
    # The same, but in letters: the router cuts the text where a token's name stands.
    router.with_card(special_tokens={"[OTHER]": 256, "[TOOL_CALLS]": 999})
    router._pieces = lambda: iter(router.text)  # type: ignore[method-assign]
    assert (await told(router, tools=[F])) == {
        "content": router.text,
        "reasoning_content": "",
        "calls": [],
        "ends": "stop",
    }


@pytest.mark.examples(4)
@pytest.mark.parametrize("form", NAMES)
async def test_a_call_that_is_cut_can_be_sent_back(form: str) -> None:
    text = WRITTEN[form][0]
    router = ScriptedRouter(text[: text.index("京") + 1], 9).with_card(tool_format=form)
    router.reason = FinishReason.LENGTH
    said = await told(router, tools=[LOOK, F])
    assert said["ends"] == "length" and said["content"] == "" and said["calls"][0][0] == "look"
    async with served(router) as (client, _):
        message = (await client.post(CHAT, json={"messages": FOX, "tools": [LOOK, F]})).json()["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        again = [*FOX, message, {"role": "tool", "content": "cut", "tool_call_id": call_id}]
        assert (await client.post(CHAT, json={"messages": again, "tools": [LOOK, F]})).status_code == 200


async def test_ids_of_calls_are_those_that_the_template_takes() -> None:
    for form, looks in (
        ("mistral", lambda id: len(id) == 9 and id.isalnum()),
        ("hermes", lambda id: id.startswith("call_")),
    ):
        for choice, text in (("auto", WRITTEN[form][1]), ("required", '[{"name": "f", "arguments": {}}]')):
            router = ScriptedRouter(text).with_card(tool_format=form)
            async with served(router) as (client, _):
                asked = {"messages": FOX, "tools": [F], "tool_choice": choice}
                message = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]
                assert looks(message["tool_calls"][0]["id"]), message


async def test_names_that_the_template_does_not_show() -> None:
    ann, tool = (
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "tool", "content": "b", "tool_call_id": "c", "name": "look"},
    )
    shown = ScriptedRouter("ok").with_card(named_roles=("user",))
    hidden = ScriptedRouter("ok").with_card(named_roles=("assistant",))
    for router, names, ignored in ((shown, ("Ann", "look"), ()), (hidden, ("", "look"), ("messages[].name",))):
        asked, unread = readable(read_chat({"messages": [ann, tool]}), router.card, strict=False)
        assert tuple(message.name for message in asked.inputs[0]) == names and unread == ignored
        async with served(router) as (client, _):
            answer = await client.post(CHAT, json={"messages": [ann, tool]})
        assert answer.headers.get("x-outrider-ignored", "") == ", ".join(ignored)
    async with served(hidden, HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
        error = (await client.post(CHAT, json={"messages": [ann]})).json()["error"]
    assert error["param"] == "messages[0].name"


async def test_thoughts_that_are_sent_back() -> None:
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "A fox?"}
    newer = {"role": "assistant", "content": "Yes.", "reasoning": "A fox?"}
    for message in (answer, newer, {**answer, **newer}):
        router = ScriptedRouter("ok").with_card(reads_thoughts=True)
        async with served(router) as (client, _):
            whole = await client.post(CHAT, json={"messages": [*FOX, message, *FOX]})
            assert whole.status_code == 200 and "x-outrider-ignored" not in whole.headers
            unread = await client.post(CHAT, json={"messages": [*FOX, {**message, "reasoning": "Another."}, *FOX]})
            assert unread.status_code == (400 if "reasoning_content" in message else 200)
    router = ScriptedRouter("ok")
    async with served(router) as (client, _):
        whole = await client.post(CHAT, json={"messages": [*FOX, answer, *FOX, newer, *FOX]})
        assert whole.headers["x-outrider-ignored"] == "messages[].reasoning_content"
    async with served(router, HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
        error = (await client.post(CHAT, json={"messages": [*FOX, answer, *FOX]})).json()["error"]
        assert error["param"] == "messages[1].reasoning_content"


async def test_a_form_holds_for_the_answer() -> None:
    router = ScriptedRouter('<think>A fox?</think>{"a": "b"}').with_card(thoughts="think")
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    said = await told(router, response_format=schema)
    assert (said["content"], said["reasoning_content"]) == ('{"a": "b"}', "A fox?")
    form = router.asked[-1].sampling.structured_outputs
    assert form is not None and form.kind == "grammar" and json.dumps(PARAMETERS)[:-1] in form.text
    router.text = '<think>A fox?</think>[{"name": "look", "arguments": {"a": "b"}}]'
    said = await told(router, tools=[LOOK], tool_choice="required")
    assert said["calls"] == [["look", '{"a": "b"}']] and said["reasoning_content"] == "A fox?"
    # Of an answer that is calls, no text has the form that is asked for text.
    calls = router.asked[-1].sampling.structured_outputs
    assert await told(router, tools=[LOOK], tool_choice="required", response_format=schema) == said
    assert router.asked[-1].sampling.structured_outputs == calls
    # A form that is none is refused by its own name.
    wrong_schema: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "hiccup"}}}
    calls_and_form = {"messages": FOX, "tools": [LOOK], "tool_choice": "required", "response_format": schema}
    async with served(router, HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
        strictly = await client.post(CHAT, json=calls_and_form)
        assert strictly.status_code == 400 and strictly.json()["error"]["param"] == "response_format"
    async with served(router) as (client, _):
        named = await client.post(CHAT, json=calls_and_form)
        assert named.status_code == 200 and named.headers["x-outrider-ignored"] == "response_format"
        wrong = await client.post(CHAT, json={**calls_and_form, "response_format": wrong_schema})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "response_format.json_schema.schema"
        flat = {**wrong_schema["json_schema"], "type": "json_schema"}
        tool = {"type": "function", "name": "look", "parameters": PARAMETERS}
        body = {"input": "fox", "tools": [tool], "tool_choice": "required", "text": {"format": flat}}
        wrong = await client.post("/v1/responses", json=body)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "text.format.schema"
        named = await client.post("/v1/responses", json={**body, "text": {"format": {"type": "json_object"}}})
        assert named.status_code == 200 and named.headers["x-outrider-ignored"] == "text.format"
        wrong = await client.post(CHAT, json={"messages": FOX, "structured_outputs": {"regex": "a\\"}})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "structured_outputs.regex"
        both = {"tools": [LOOK], "tool_choice": "required", "structured_outputs": {"regex": "a"}}
        wrong = await client.post(CHAT, json={"messages": FOX, **both})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_can_be_called_though_all_are_shown(mode: str) -> None:
    router = ScriptedRouter("Words." if mode == "auto" else '[{"name": "look", "arguments": {"a": "b"}}]')
    only = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "look"}}]},
    }
    said = await told(router, tools=[LOOK, F], tool_choice=only)
    assert said["calls"] == ([] if mode == "auto" else [["look", '{"a": "b"}']])
    shown = json.loads(read_chat({"messages": FOX, "tools": [LOOK, F], "tool_choice": only}).chat.tools)
    assert [each["function"]["name"] for each in shown] == ["look", "f"]
    form = router.asked[-1].sampling.structured_outputs
    assert form is not None and "look" in form.text and '"f' not in form.text
    # JSON that looks like a call of another one is text, as for a model that writes calls so.
    if mode == "auto":
        router.text = '{"name": "f", "parameters": {}}'
        router = router.with_card(tool_format="llama_json")
        said = await told(router, tools=[LOOK, F], tool_choice=only, response_format={"type": "json_object"})
        assert said["calls"] == [] and said["content"] == '{"name": "f", "parameters": {}}'
    # All of them are no fewer than without the field.
    only["allowed_tools"]["tools"].append({"type": "function", "function": {"name": "f"}})  # type: ignore[index]
    await told(router, tools=[LOOK, F], tool_choice=only)
    both = router.asked[-1].sampling.structured_outputs
    await told(router, tools=[LOOK, F], tool_choice=mode)
    assert both == router.asked[-1].sampling.structured_outputs
