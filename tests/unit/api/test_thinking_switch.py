"""How long the model is to think, for templates that know whether it thinks, how long, or both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.api.config import HttpConfig
from services.api.http.openai.chat_options import with_switch
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.model_fit import readable
from services.api.messages import ChatOptions
from tests.contract.test_openai_streams import served
from tests.servers.scripted_router import CARD, ScriptedRouter

FOX: dict[str, Any] = {"messages": [{"role": "user", "content": "fox"}]}


@pytest.mark.parametrize(
    ("reads", "asked", "given", "ignored"),
    [
        (("enable_thinking",), {"reasoning_effort": "none"}, {"enable_thinking": False}, ()),
        (("thinking",), {"reasoning_effort": "none"}, {"thinking": False}, ()),
        # How long has no effect there.
        (("enable_thinking",), {"reasoning_effort": "low"}, {"enable_thinking": True}, ("reasoning_effort",)),
        (
            ("enable_thinking", "reasoning_effort"),
            {"reasoning_effort": "low"},
            {"enable_thinking": True, "reasoning_effort": "low"},
            (),
        ),
        (("enable_thinking", "reasoning_effort"), {"reasoning_effort": "none"}, {"enable_thinking": False}, ()),
        (("reasoning_effort",), {"reasoning_effort": "none"}, {"reasoning_effort": "none"}, ()),
        ((), {"reasoning_effort": "none"}, {}, ("reasoning_effort",)),
        (("enable_thinking",), {}, {}, ()),
        # What is said of the switch itself counts.
        (
            ("enable_thinking", "reasoning_effort"),
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "high"},
            (),
        ),
    ],
    ids=str,
)
def test_the_effort_is_told_by_what_the_template_reads(
    reads: tuple[str, ...], asked: dict[str, Any], given: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    found, unread = readable(read_chat({**FOX, **asked}), replace(CARD, template_options=reads), strict=False)
    assert json.loads(found.chat.template_kwargs or "{}") == given
    assert unread == ignored


async def test_every_door_says_it_to_the_template() -> None:
    router = ScriptedRouter("ok").with_card(template_options=("enable_thinking",))
    async with served(router) as (client, _):
        for path, body in (
            ("/v1/chat/completions", {**FOX, "reasoning_effort": "none"}),
            ("/v1/chat/completions/render", {**FOX, "reasoning_effort": "none"}),
            ("/tokenize", {**FOX, "reasoning_effort": "none"}),
            ("/v1/responses", {"input": "fox", "reasoning": {"effort": "none"}}),
            ("/v1/responses/input_tokens", {"input": "fox", "reasoning": {"effort": "none"}}),
            ("/v1/messages", {**FOX, "max_tokens": 5, "output_config": {"effort": "none"}}),
            ("/v1/messages/count_tokens", {**FOX, "thinking": {"type": "disabled"}}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200 and "x-outrider-ignored" not in answer.headers, path
            assert json.loads(router.rendered[-1].chat.template_kwargs) == {"enable_thinking": False}, path
    async with served(router, HttpConfig(port=0, unknown_fields="refuse")) as (client, _):
        answers = [
            await client.post("/v1/chat/completions", json={**FOX, "reasoning_effort": each}) for each in ("none", "low")
        ]
    assert [each.status_code for each in answers] == [200, 400]


def test_no_effort_asks_for_nothing() -> None:
    plain = ChatOptions(template_kwargs='{"a": 1}')
    assert with_switch(plain, replace(CARD, template_options=("enable_thinking",))) is plain
