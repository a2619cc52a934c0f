"""``GET /v1/outrider/status``: what a service is doing, and who may see what of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx2
import pytest
from typing_extensions import override

from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api import lately
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.live_status import state_in_time, status_of
from services.api.http.server import serve_http
from speculation import limits
from speculation.errors import Unavailable
from speculation.messages import DecodingCounts, ServiceState, VerifierCard
from tests.servers.scripted_router import ScriptedRouter

PATH, KEY = "/v1/outrider/status", "k" * 20


def card(running: int, free: int, counts: DecodingCounts, connected: bool = True) -> VerifierCard:
    return VerifierCard(
        model="m", max_model_len=9, vocab_size=9, running=running, waiting=1, free_blocks=free, total_blocks=10,
        bit_exact=True, counts=counts, drafters={"the drafter": connected},
    )  # fmt: skip


ONE = DecodingCounts(
    tokens=30, passes=10, prompt_tokens=100, cached_prompt_tokens=40, drafted_by_source={"suffix": 40, "recycling": 9},
    accepted_by_source={"suffix": 20}, saved_s=2.5,
)  # fmt: skip
OTHER = DecodingCounts(
    tokens=10,
    passes=10,
    prompt_tokens=20,
    drafted_by_source={"recycling": 91},
    accepted_by_source={"recycling": 3},
    saved_s=-1.0,
)
STATE = ServiceState(
    verifiers=(card(2, 5, ONE), card(1, 10, OTHER, connected=False)),
    components={"verifier": {"running": 2, "starting": 1}, "drafter": {"running": 1}},
)
LOAD = {
    "object": "outrider.status",
    "ready": True,
    "requests": {"running": 3, "waiting": 2},
    "components": {"verifier": {"running": 2, "starting": 1}, "drafter": {"running": 1}},
}


def test_verifiers_are_added_up() -> None:
    told = status_of(STATE, whole=True)
    assert LOAD.items() <= told.items()
    assert told["cache"] == {"used": 0.25, "prompt_tokens": 120, "cached_prompt_tokens": 40}
    assert told["decoding"] == {"tokens": 40, "passes": 20, "tokens_per_pass": 2.0, "seconds_saved": 1.5}
    assert told["sources"] == [
        {"source": "recycling", "drafted": 100, "accepted": 3},
        {"source": "suffix", "drafted": 40, "accepted": 20},
    ]
    assert [each["drafters"] for each in told["verifiers"]] == [{"the drafter": True}, {"the drafter": False}]
    assert [each["cache_used"] for each in told["verifiers"]] == [0.5, 0.0]


def test_others_see_the_load_alone() -> None:
    told = status_of(STATE, whole=False)
    assert LOAD.items() <= told.items() and set(told) == {*LOAD, "version"}


def test_without_a_verifier_nothing_is_ready() -> None:
    told = status_of(ServiceState(components={"verifier": {"starting": 1}}), whole=True)
    assert told["ready"] is False and told["decoding"]["tokens_per_pass"] == 0.0 and told["cache"]["used"] == 0.0


@asynccontextmanager
async def served(router: ScriptedRouter, public: PublicServerConfig | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    public = public or PublicServerConfig(port=0)
    with closing(open_gate((), public.keys_file, public.audit_log)) as gate:
        server = await serve_http(router, HttpConfig(port=0, public=public), gate)
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            yield client
        await server.stop(0)


def scripted() -> ScriptedRouter:
    router = ScriptedRouter("words")
    router.state = STATE
    return router


async def test_without_keys_everything_is_shown() -> None:
    async with served(scripted()) as client:
        answer = await client.get(PATH)
        assert answer.status_code == 200 and answer.json() == status_of(STATE, whole=True)
        assert (await client.post(PATH, json={})).status_code == 405


async def test_a_keys_scopes_decide(tmp_path: Path) -> None:
    keys, audit = tmp_path / "keys.yaml", tmp_path / "audit"
    keys.write_text(
        f"- {{hash: {hash_key(KEY + '0')}, id: usual}}\n"
        f"- {{hash: {hash_key(KEY + '1')}, id: sees, scopes: [generate, observe]}}\n"
    )
    async with served(scripted(), PublicServerConfig(port=0, keys_file=keys, audit_log=str(audit))) as client:
        for key, whole in ((KEY + "0", False), (KEY + "1", True)):
            answer = await client.get(PATH, headers={"authorization": f"Bearer {key}"})
            assert answer.json() == status_of(STATE, whole=whole)
        assert audit.read_text() == ""
        assert (await client.get(PATH)).status_code == 401
        assert "no key" in audit.read_text()


async def test_many_who_ask_cost_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    router = scripted()
    async with served(router) as client:
        await asyncio.gather(*(client.get(PATH) for _ in range(8)))
        assert router.states_asked == 1
        monkeypatch.setattr(lately, "_FRESH_S", 0.0)
        await client.get(PATH)
        assert router.states_asked == 2


class Silent(ScriptedRouter):
    """Never tells its state."""

    @override
    async def service_state(self) -> ServiceState:
        await asyncio.Event().wait()
        raise AssertionError


class Failing(ScriptedRouter):
    """Cannot tell its state."""

    @override
    async def service_state(self) -> ServiceState:
        raise Unavailable("gone")


@pytest.mark.parametrize("kind", [Silent, Failing])
async def test_a_service_that_does_not_answer_is_not_ready(
    kind: type[ScriptedRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DESCRIBE_S", 0.05)
    assert await state_in_time(kind()) == ServiceState()
