"""Who may call, and how much: rates, concurrency and refunds under a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.access.audit import AuditLog
from services.access.gate import Gate
from services.access.key_records import hash_key
from services.access.key_ring import KeyRing
from services.api.messages import ChatMessage, ClientRequest, Completion, RequestedSampling, TextChunk, Timing
from speculation.errors import (
    InvalidArgument,
    OutriderError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from speculation.types import FinishReason, SpeculationStats
from tests.running.refusals import refuses
from tests.unit.api.test_keys import Clock

KEY = "k" * 24


_OPEN: list[Gate] = []


@pytest.fixture(autouse=True)
def closed_gates() -> Iterator[None]:
    """Close what ``gate`` opened: an audit file that is left open is told in some later test."""
    yield
    while _OPEN:
        _OPEN.pop().close()


def gate(tmp_path: Path, clock: Clock, *records: str) -> Gate:
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(f"- {{hash: {hash_key(KEY + str(n))}, {text}}}" for n, text in enumerate(records)))
    made = Gate(KeyRing(file=file, clock=clock), AuditLog(str(tmp_path / "audit"), now=clock), clock=clock, now=clock)
    _OPEN.append(made)
    return made


def asked(tokens: int = 10, max_tokens: int | None = 10, **more: Any) -> ClientRequest:
    return ClientRequest(input=(5,) * tokens, sampling=RequestedSampling(max_tokens=max_tokens), **more)


def completion(prompt: int, answer: int) -> Completion:
    return Completion(
        request_id="r",
        finish_reason=FinishReason.STOP,
        stop=None,
        prompt_token_ids=(5,) * prompt,
        completion_tokens=answer,
        cached_tokens=0,
        seed=1,
        model="m",
        strategy="suffix",
        stats=SpeculationStats(seconds_saved=-0.1254),
        timing=Timing(queue_s=0, time_to_first_token_s=0, total_s=0),
    )


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]


async def test_requests_per_minute(tmp_path: Path) -> None:
    clock = Clock()
    door = gate(tmp_path, clock, "id: a, requests_per_minute: 2", "id: b, requests_per_minute: 2")
    one, other = door.caller(KEY + "0"), door.caller(KEY + "1")
    for _ in range(2):
        async with door.admit(one, asked()):
            pass
    assert door.rates(one)["x-ratelimit-remaining-requests"] == "0"
    assert door.rates(one)["x-ratelimit-reset-requests"] == "60.000s"
    with pytest.raises(ResourceExhausted, match="2 requests per minute") as caught:
        async with door.admit(one, asked()):
            pass
    assert caught.value.retry_after_s == pytest.approx(30)
    # Others have limits of their own.
    async with door.admit(other, asked()):
        pass
    clock.at += 30.01
    async with door.admit(one, asked()):
        pass


async def test_tokens_are_charged_first_and_what_was_not_used_is_given_back(tmp_path: Path) -> None:
    clock = Clock()
    door = gate(tmp_path, clock, "tokens_per_minute: 100")
    caller = door.caller(KEY + "0")

    def left() -> int:
        return int(door.rates(caller)["x-ratelimit-remaining-tokens"])

    async with door.admit(caller, asked(20, 60)) as visit:
        assert left() == 20
        with pytest.raises(ResourceExhausted, match="100 tokens per minute"):
            async with door.admit(caller, asked(20, 60)):
                pass
        visit.note(TextChunk(text="a", token_ids=(1, 2)))
        visit.note(completion(20, 5))
    assert left() == 75
    # Left in the middle: what has come counts.
    leaving = door.admit(caller, asked(20, 50))
    (await leaving.__aenter__()).note(TextChunk(text="a", token_ids=(1, 2, 3)))
    assert not await leaving.__aexit__(asyncio.CancelledError, asyncio.CancelledError(), None)
    assert left() == 52
    # Refused behind the gate: nothing was used.
    with pytest.raises(Unavailable):
        async with door.admit(caller, asked(20, 20)):
            raise Unavailable("gone")
    assert left() == 52
    # A text's length is guessed, and settled by the truth, which may leave a debt.
    async with door.admit(caller, ClientRequest(input="x" * 40, sampling=RequestedSampling(max_tokens=10))) as visit:
        assert left() == 32
        visit.note(completion(80, 10))
    assert left() == 0
    clock.at += 22
    assert left() == 0
    clock.at += 3
    assert left() > 0
    with refuses(InvalidArgument, field="max_tokens", value=60, allowed="100 tokens_per_minute") as caught:
        async with door.admit(caller, asked(60, 60)):
            pass
    assert caught.value.field == "max_tokens"


async def test_concurrency_and_what_a_key_may_ask_for(tmp_path: Path) -> None:
    door = gate(
        tmp_path,
        Clock(),
        "tenant: t, weight: 3, max_concurrent: 1, max_tokens: 50, strategies: [suffix]",
        "scopes: [forget]",
    )
    caller, idle = door.caller(KEY + "0"), door.caller(KEY + "1")
    async with door.admit(caller, asked(max_tokens=None)) as visit:
        assert (visit.request.tenant, visit.request.weight, visit.request.most_tokens) == ("t", 3.0, 50)
        with pytest.raises(ResourceExhausted, match="max_concurrent"):
            async with door.admit(caller, asked()):
                pass
    for wrong, field in ((asked(max_tokens=51), "max_tokens"), (asked(strategy="blend"), "speculation.strategy")):
        with refuses(InvalidArgument, says="with this API key") as caught:
            async with door.admit(caller, wrong):
                pass
        assert caught.value.field == field
    async with door.admit(caller, asked(strategy="suffix")):
        pass
    with pytest.raises(PermissionDenied, match="scopes are forget"):
        async with door.admit(idle, asked()):
            pass


async def test_every_request_and_every_refused_caller_is_recorded_without_text(tmp_path: Path) -> None:
    clock = Clock()
    door = gate(tmp_path, clock, "id: a, tenant: t, expires: 2030-01-01")
    for wrong in (None, "wrong"):
        with pytest.raises(Unauthenticated):
            door.caller(wrong, "ipv4:1.2.3.4:5")
    caller = door.caller(KEY + "0", "ipv4:1.2.3.4:5")
    secret = ClientRequest(
        input=(ChatMessage(role="user", content="secret"),), sampling=RequestedSampling(), request_id="r1"
    )
    async with door.admit(caller, secret) as visit:
        visit.note(completion(3, 4))
    with pytest.raises(OutriderError):
        async with door.admit(caller, secret):
            raise Unavailable("gone")
    clock.at = 2e9
    with pytest.raises(Unauthenticated, match="has expired"):
        door.caller(KEY + "0")
    told = lines(tmp_path)
    assert [line["outcome"] for line in told] == ["no key", "unknown key", "ok", "Unavailable", "expired key"]
    assert told[2] == {
        "time": "1970-01-01T00:16:40.000+00:00",
        "request_id": "r1",
        "key_id": "a",
        "tenant": "t",
        "method": "Generate",
        "outcome": "ok",
        "address": "ipv4:1.2.3.4:5",
        "model": "m",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "strategy": "suffix",
        "seconds_saved": -0.125,
    }
    # What drafting saved is known at the end of an answer alone.
    assert told[3]["seconds_saved"] is None
    assert "secret" not in (tmp_path / "audit").read_text()


async def test_a_changed_limit_counts_at_once(tmp_path: Path) -> None:
    clock = Clock()
    door = gate(tmp_path, clock, "id: a, requests_per_minute: 1")
    async with door.admit(door.caller(KEY + "0"), asked()):
        pass
    gate(tmp_path, clock, "id: a, requests_per_minute: 3")
    clock.at += 1.5
    door.caller(KEY + "0")
    door._keys.settle()
    caller = door.caller(KEY + "0")
    for _ in range(2):
        async with door.admit(caller, asked()):
            pass
    with pytest.raises(ResourceExhausted):
        async with door.admit(caller, asked()):
            pass
    told = [line for line in lines(tmp_path) if line["method"] == "reload_keys"]
    assert [(line["outcome"], line["keys"]) for line in told] == [("ok", 1)]


async def test_a_wall_clock_that_jumps_changes_no_limit(tmp_path: Path) -> None:
    clock, wall = Clock(), Clock()
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{hash: {hash_key(KEY)}, id: a, requests_per_minute: 2, tokens_per_minute: 1000}}")
    audit = AuditLog(str(tmp_path / "audit"), now=wall)
    door = Gate(KeyRing(file=file, clock=clock), audit, clock=clock, now=wall)
    caller = door.caller(KEY)
    for jump in (3600, -7200):
        async with door.admit(caller, asked()):
            before = door.rates(caller)
            wall.at += jump
            assert door.rates(caller) == before
    for jump in (3600, -7200, 0):
        wall.at += jump
        with pytest.raises(ResourceExhausted) as caught:
            async with door.admit(door.caller(KEY), asked()):
                pass
        assert caught.value.retry_after_s == pytest.approx(30)
    clock.at += 30.01
    async with door.admit(door.caller(KEY), asked()):
        pass


async def test_without_keys_there_is_one_user_and_no_limit() -> None:
    door = Gate(KeyRing())
    caller = door.caller(None)
    assert (caller.key_id, caller.tenant) == ("", "")
    assert door.rates(caller) == {}
    async with door.admit(caller, asked()) as visit:
        assert visit.request.tenant == ""
    assert door.caller("some key").tenant == hash_key("some key")[:16]
