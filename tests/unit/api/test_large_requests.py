"""Millions of token ids are not looked at one by one where that would hold up everybody else's answers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.datastructures import Headers
from typing_extensions import override

from outrider.v1 import generation_pb2 as pb
from services.access.gate import Gate
from services.access.key_ring import KeyRing
from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc.messages import decode_request
from services.api.http.endpoints import Endpoints
from services.api.http.json_body import parse_object, read_body
from services.api.http.openai import model_fit
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.errors import Refused
from services.api.http.openai.model_fit import of_a_tool, unused_form
from services.api.messages import ClientRequest, RequestedSampling
from services.router.generic_tools import calls_as_text
from services.router.sampling import complete_sampling
from services.router.tokens import Tokens, length_of
from services.tool_formats.raw_json import begun_members
from speculation import limits
from speculation.errors import InvalidArgument, PromptTooLong
from speculation.messages import VerifierCard
from speculation.types import SamplingParams
from tests.running.patience import PATIENCE_S
from tests.running.refusals import refuses
from tests.servers.scripted_router import ScriptedRouter


class Unread(tuple[int, ...]):
    """Token ids that nobody may look at all of."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("looked at one by one")


async def test_admission_and_the_bound_on_lengths_count_tokens(tiny_model: Path) -> None:
    ids, gate = Unread((5,) * 1000), Gate(KeyRing())
    async with gate.admit(gate.caller(None), ClientRequest(input=ids, sampling=RequestedSampling())) as visit:
        assert visit.prompt_tokens == length_of(ids) == 1000
    with refuses(
        PromptTooLong,
        field="prompt",
        value="1000 tokens",
        allowed="at most 31 tokens (this model's maximum context length is 32 tokens)",
    ):
        Tokens(str(tiny_model)).check_length(ids, 32)


def test_more_tokens_than_any_context_are_refused_as_they_are() -> None:
    most = limits.MAX_SESSION_TOKENS
    for count in (most, most + 1):
        wire = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * count))
        if count == most:
            assert len(decode_request(wire, tenant=None).input) == most
        else:
            with refuses(PromptTooLong, "prompt_token_ids", f"{count} tokens", allowed=f"at most {most}"):
                decode_request(wire, tenant=None)


@pytest.mark.parametrize(("count", "aside"), [(10, False), (50_000, True)])
async def test_what_a_large_body_holds_is_checked_in_a_thread(count: int, aside: bool) -> None:
    body = json.dumps({"prompt": [5] * count}).encode()
    threads = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    def read(found: dict[str, Any]) -> object:
        threads.append(threading.current_thread())
        return read_completion(found)

    await read_body(receive, Headers({"content-type": "application/json"}), 60.0, read)
    assert [thread is not threading.main_thread() for thread in threads] == [aside]


@pytest.mark.parametrize(
    "many", [b'{"a": [' + b"[]," * 70_000 + b"[]]}", b"{" + b",".join(b'"%d":1' % n for n in range(70_000)) + b"}"]
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_read(many: bytes) -> None:
    with refuses(Refused, field="body", value="more than 65536 objects, lists and members of objects"):
        parse_object(many)
    # In a text they are letters.
    text = '[{":"}]' * 70_000
    assert parse_object(json.dumps({"prompt": [text, '\\"' * 9]}).encode())["prompt"][0] == text


def test_allowed_tokens_reach_a_verifier_once_each() -> None:
    """Each choice is sent them, and the verifier's loop looks at all of them."""
    wire = pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(allowed_token_ids=[5, 7, 5] * 1000))
    assert decode_request(wire, tenant=None).sampling.allowed_token_ids == (5, 7)
    body = {"model": "m", "prompt": "a", "allowed_token_ids": [5, 7, 5] * 1000}
    assert read_completion(body).sampling.allowed_token_ids == (5, 7)


def test_allowed_tokens_outside_the_vocabulary_reach_none() -> None:
    card = VerifierCard(
        model="m", max_model_len=32, vocab_size=10, running=0, waiting=0, free_blocks=1, total_blocks=1, bit_exact=True
    )
    with refuses(InvalidArgument, field="allowed_token_ids", value=12):
        complete_sampling(RequestedSampling(allowed_token_ids=(5, *range(10, 13))), card, 3)
    assert complete_sampling(RequestedSampling(allowed_token_ids=(5, 9)), card, 3).allowed_token_ids == (5, 9)
    # `outrider plan --explain` may know of no vocabulary.
    assert complete_sampling(RequestedSampling(), replace(card, vocab_size=0), 3).allowed_token_ids == ()


def test_many_calls_become_text_in_a_time_that_grows_as_they_do() -> None:
    """Written one behind the other, each copied all before it: 20,000 took eleven seconds of everybody's."""
    call = {"function": {"name": "f", "arguments": {"a": "x" * 60}}}
    began = time.perf_counter()
    (message,) = calls_as_text([{"role": "assistant", "content": "Look:", "tool_calls": [call] * 20_000}])
    assert message["content"].startswith("Look:\n<tool_call>") and message["content"].count("<tool_call>") == 20_000
    assert time.perf_counter() - began < 3.0
    answers = [{"role": "tool", "tool_call_id": "1", "content": "y"}] * 3
    assert [each["content"].count("y") for each in calls_as_text([*answers, message, *answers])] == [3, 0, 3]


def test_a_cut_object_of_many_members_is_not_copied_for_each() -> None:
    copied = 0

    class Counted(str):
        @override
        def __getitem__(self, place: Any) -> str:
            nonlocal copied
            found = super().__getitem__(place)
            copied += len(found)
            return found

    text = "{" + ", ".join(f'"k{number}": 1' for number in range(1000)) + ', "cut": [1, 2'
    found = begun_members(Counted(text))
    assert (len(found), found["k7"], found["cut"]) == (1001, "1", "[1, 2")
    assert copied < 4 * len(text)


async def test_forms_that_take_the_engine_long_are_checked_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the threads in which all bodies are read and all long answers written."""
    ends = Endpoints(ScriptedRouter(), Gate(KeyRing()), HttpConfig(port=0, public=PublicServerConfig(port=0)), bytes)
    go, checked = threading.Event(), list[tuple[str, str]]()

    def check(params: SamplingParams) -> None:
        assert go.wait(PATIENCE_S) and params.structured_outputs is not None
        checked.append((threading.current_thread().name, params.structured_outputs.text))

    monkeypatch.setattr(model_fit, "check_sampling", check)

    async def asks(tenant: str, name: str) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": name}}}
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
        call = cast(Any, SimpleNamespace(known_caller=SimpleNamespace(tenant=tenant)))
        asked = read_chat({**body, "response_format": form})
        assert await unused_form(asked, ends.aside(call), strict=False) == ("response_format",)

    calls = [asyncio.create_task(asks(*each)) for each in [("greedy", "many")] * 5 + [("other", "one")]]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*calls)
    assert {name.partition("_")[0] for name, _ in checked} == {"checks"}
    assert "one" in checked[1][1] or "one" in checked[2][1]


@pytest.mark.parametrize("beside", [True, False])
async def test_a_form_that_has_no_effect_is_refused_where_it_stands(beside: bool) -> None:
    schema = {"type": "hiccup"}
    form = {"type": "json_object", "schema": schema}
    if not beside:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}

    async def at_once(check: Any) -> Any:
        return check()

    with pytest.raises(InvalidArgument) as refused:
        await unused_form(read_chat({**body, "response_format": form}), at_once, strict=False)
    assert refused.value.field == ("response_format.schema" if beside else "response_format.json_schema.schema")


async def test_a_tool_of_no_form_is_looked_for_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 128 may take the engine half a second."""
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "hiccup"}}} for at in range(2)]
    asked = read_chat({"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"})
    error = InvalidArgument("structured_outputs.grammar", "x", "valid")

    async def at_once(check: Any) -> Any:
        return check()

    assert (await of_a_tool(asked, error, at_once)).field == "tools[0].function.parameters"
    monkeypatch.setattr(model_fit, "_NAMED_WITHIN_S", -1.0)
    assert await of_a_tool(asked, error, at_once) is error
