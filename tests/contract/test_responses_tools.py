"""Tools of the Responses API as agents offer them: functions in namespaces, tools of a text, built-in tools beside them; and
the system messages that agents send behind their instructions."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from services.api.config import HttpConfig
from services.api.messages import ChatMessage
from speculation.types import FinishReason
from tests.contract.test_openai_streams import served
from tests.servers.http_service import HttpService
from tests.servers.openai_types import check_response, check_response_event, response_events_of
from tests.servers.responses import CLIENT, PATH, assembled, chat, stream, whole
from tests.servers.scripted_router import ScriptedRouter

LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patches"}
BOX: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__box__",
    "description": "A box.",
    "tools": [{**LOOK, "description": "Looks", "defer_loading": False}, PATCH],
}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False}
DRAWN: dict[str, Any] = {
    "type": "custom",
    "name": "drawn",
    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
}
# What Codex sends with every request.
AGENT: dict[str, Any] = {
    "tools": [SEARCH, LOOK, BOX, DRAWN],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "detailed"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "service_tier": "flex",
    "client_metadata": {"x": "y"},
}
IGNORED = "x-outrider-ignored"


def called(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def answered(router: ScriptedRouter, **body: Any) -> tuple[dict[str, Any], httpx2.Headers]:
    """A response, and its headers; in events it is the same."""
    async with served(router) as (client, _):
        whole_one = await client.post(PATH, json=body)
        assert whole_one.status_code == 200, whole_one.text
        events = response_events_of((await client.post(PATH, json={**body, "stream": True})).text)
    answer = whole_one.json()
    check_response(answer)
    for event in events:
        check_response_event(event)
    outputs = [[{**item, "id": "", "call_id": ""} for item in each] for each in (
        answer["output"], assembled(events), events[-1]["response"]["output"])]  # fmt: skip
    assert [{name: value for name, value in item.items() if name != "content"} for item in outputs[1]] == [
        {name: value for name, value in item.items() if name != "content"} for item in outputs[0]
    ]
    assert outputs[2] == outputs[0]
    return answer, whole_one.headers


@pytest.mark.parametrize("pieces", [1, 7, 999])
async def test_what_an_agent_sends_is_answered(pieces: int) -> None:
    router = ScriptedRouter(
        called("mcp__box__look", {}) + called("mcp__box__patch", {"input": "a\nb"}) + called("look", {}), pieces
    )
    answer, headers = await answered(router, input="fox", **{**AGENT, "parallel_tool_calls": True})
    assert [(item["type"], item["name"], item.get("namespace")) for item in answer["output"]] == [
        ("function_call", "look", "mcp__box__"),
        ("custom_tool_call", "patch", "mcp__box__"),
        ("function_call", "look", None),
    ]
    assert [item.get("input", item.get("arguments")) for item in answer["output"]] == ["{}", "a\nb", "{}"]
    assert headers[IGNORED] == "tools[0].type, tools[3].format.type, reasoning.effort"
    assert (answer["service_tier"], answer["tools"]) == ("default", AGENT["tools"])
    # The model is shown each tool as a function.
    shown = {each["function"]["name"]: each["function"] for each in json.loads(router.rendered[-1].chat.tools)}
    assert list(shown) == ["look", "mcp__box__look", "mcp__box__patch"]
    assert shown["mcp__box__look"]["description"] == "A box.\nLooks" and "defer_loading" not in shown["mcp__box__look"]
    assert shown["mcp__box__patch"]["parameters"]["required"] == ["input"]


async def test_a_call_of_a_text_that_is_cut_is_told_as_it_was_written() -> None:
    router = ScriptedRouter('<tool_call>\n{"name": "patch", "arguments": {"input": "a')
    router.reason = FinishReason.LENGTH
    answer, _ = await answered(router, input="fox", tools=[PATCH])
    assert [(item["type"], item["input"]) for item in answer["output"]] == [("custom_tool_call", '{"input": "a')]


async def test_what_is_left_out_is_refused_where_nothing_may_be() -> None:
    async with served(ScriptedRouter("ok"), HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
        for tools, field in (([LOOK, SEARCH], "tools[1].type"), ([LOOK, DRAWN], "tools[1].format.type")):
            for path in (PATH, f"{PATH}/input_tokens"):
                answer = await client.post(path, json={"input": "fox", "tools": tools})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    async with served(ScriptedRouter("ok")) as (client, _):
        # Who offers nothing else asks for these.
        alone = await client.post(PATH, json={"input": "fox", "tools": [SEARCH]})
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools[0].type")
        for choice, field in (
            ({"type": "web_search"}, "tool_choice.type"),
            ({"type": "function", "name": "web_search"}, "tool_choice.name"),
        ):
            forced = await client.post(PATH, json={"input": "fox", "tools": [LOOK, SEARCH], "tool_choice": choice})
            assert (forced.status_code, forced.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([SEARCH, {**LOOK, "name": "a b"}], "tools[1].name"),
        ([SEARCH, BOX, {**LOOK, "parameters": []}], "tools[2].parameters"),
        ([SEARCH, {**BOX, "tools": [LOOK, {**LOOK, "strict": 1}]}], "tools[1].tools[1].strict"),
        ([{**BOX, "tools": [BOX]}], "tools[0].tools[0].type"),
        ([{**BOX, "name": "x" * 64}], "tools[0].tools[0].name"),
        ([{**BOX, "tools": "look"}], "tools[0].tools"),
        ([LOOK, {**BOX, "tools": [LOOK, LOOK]}], "tools"),
        ([{**LOOK, "defer_loading": True}], "tools[0].defer_loading"),
        ([{**PATCH, "format": {"type": "xml"}}], "tools[0].format.type"),
        ([LOOK, {"type": "teleport"}], "tools[1].type"),
        ([LOOK, {}], "tools[1].type"),
    ],
    ids=str,
)
def test_a_tool_that_is_wrong_is_named(both_entries: HttpService, tools: Any, field: str) -> None:
    error = CLIENT.post(both_entries.url + PATH, json={"input": "fox", "tools": tools}).json()["error"]
    assert error["param"] == field, error


def test_calls_go_back_as_the_functions_that_the_model_was_shown(both_entries: HttpService) -> None:
    more = {"max_output_tokens": 6, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    items: list[Any] = [
        {"role": "user", "content": "fox"},
        {"type": "function_call", "call_id": "c", "name": "look", "namespace": "mcp__box__", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "namespace": None, "input": "a"},
        {"type": "function_call_output", "call_id": "c", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "so", "phase": "commentary"},
        {"role": "user", "content": "and"},
    ]
    calls = [("c", "mcp__box__look", "{}"), ("d", "patch", '{"input": "a"}')]
    messages = [
        {"role": "user", "content": "fox"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": "two"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and"},
    ]  # fmt: skip
    same = chat(both_entries, messages, max_tokens=6, **{name: more[name] for name in more if name != "max_output_tokens"})
    answer = whole(both_entries, input=items, **more)
    assert answer["prompt_token_ids"] == same["prompt_token_ids"]
    count = CLIENT.post(f"{both_entries.url}{PATH}/input_tokens", json={"input": items, "instructions": None}).json()
    assert count == {"object": "response.input_tokens", "input_tokens": len(same["prompt_token_ids"])}


def test_tokens_of_a_stored_conversation_are_counted(both_entries: HttpService) -> None:
    first = whole(both_entries, input="fox", max_output_tokens=4, seed=1, ignore_eos=True)
    asked: dict[str, Any] = {"input": "dog", "previous_response_id": first["id"], "instructions": "be brief"}
    second = whole(both_entries, max_output_tokens=1, return_token_ids=True, **asked)
    count = CLIENT.post(f"{both_entries.url}{PATH}/input_tokens", json=asked).json()
    assert count["input_tokens"] == len(second["prompt_token_ids"])
    assert CLIENT.get(f"{both_entries.url}{PATH}/input_tokens").status_code == 405
    # One that the context does not hold is counted as well.
    long = CLIENT.post(f"{both_entries.url}{PATH}/input_tokens", json={"input": "fox " * 600}).json()
    assert long["input_tokens"] > 600


async def test_system_messages_behind_the_instructions() -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "developer", "content": "hurry"},
        {"role": "user", "content": "three", "name": None},
    ]
    asked = {"instructions": "be brief", "input": items}
    for late, expected in (
        (True, ["system: be brief", "system: be kind", "user: one", "user: two", "system: hurry", "user: three"]),
        (False, ["system: be brief\n\nbe kind", "user: one", "user: two\n<system>\nhurry\n</system>\nthree"]),
    ):
        router = ScriptedRouter("ok").with_card(late_system=late)
        await answered(router, **asked)
        assert [
            f"{each.role}: {each.content}" for each in router.rendered[-1].input if isinstance(each, ChatMessage)
        ] == expected


async def test_names_of_messages_that_were_joined() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}, thought, {"role": "assistant", "content": "c"},
             {"role": "user", "content": "d"}]  # fmt: skip
    router = ScriptedRouter("ok").with_card(late_system=False)
    async with served(router, HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
        error = (await client.post(PATH, json={"input": items, "instructions": "i"})).json()["error"]
    assert error["param"] == "input[2].content"


@pytest.mark.parametrize(
    ("verbosity", "reads", "given", "ignored"),
    [
        ("low", ("verbosity",), {"verbosity": "low"}, None),
        ("high", (), {}, "text.verbosity"),
        ("medium", ("verbosity",), {}, None),
        ("medium", (), {}, None),
    ],
)
async def test_verbosity_is_an_option_of_the_template(
    verbosity: str, reads: tuple[str, ...], given: dict[str, str], ignored: str | None
) -> None:
    router = ScriptedRouter("ok").with_card(template_options=reads)
    answer, headers = await answered(router, input="fox", text={"verbosity": verbosity})
    assert json.loads(router.rendered[-1].chat.template_kwargs or "{}") == given
    assert headers.get(IGNORED) == ignored
    assert answer["text"]["verbosity"] == (verbosity if given else "medium")


def test_streamed_by_openais_client(both_entries: HttpService) -> None:
    tool = {"type": "custom", "name": "patch"}
    events = stream(
        both_entries, input="a", max_output_tokens=4, tools=[tool], tool_choice={"type": "custom", "name": "patch"}
    )
    item = events[-1]["response"]["output"][0]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "patch", "incomplete")
    assert [event["type"] for event in events if "custom_tool_call_input" in event["type"]] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
