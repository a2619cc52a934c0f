"""Verifiers outside of the service, by gRPC with mutual TLS: they come, drain, are killed in mid-answer, and change no token."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster import build
from cluster.checks.listeners import listeners
from cluster.checks.preflight import preflight
from cluster.models.target import ResolvedModel
from cluster.outside import verifier as outside_verifier
from cluster.outside.routing import Routing, routing
from cluster.outside.verifier import verifying
from cluster.ray.resources import components
from cluster.settings.config import Settings, load
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from services.links.grpc_verifier import GrpcVerifierLink
from services.model_files.folder import known_tokenizer
from services.verifier.service import VerifierService
from speculation.errors import ConfigurationError, NotBegun, Unavailable
from tests.engine.fakes import request
from tests.running.patience import PATIENCE_S
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.component_certificates import tls_flags, write_certificates
from tests.servers.service import tiny_settings

TOKEN = "a token of sixteen"
PROMPT = tuple([1, 2, 3, 4, 5, 6, 7, 8] * 4)


@pytest.fixture
def tls(tmp_path: Path) -> list[str]:
    """Settings with certificates of both ends."""
    authority = trustme.CA()
    for role in ("verifier", "router", "drafter"):
        write_certificates(tmp_path, authority, role)
    return tls_flags(tmp_path)


def settings_of(*flags: str, token: str = TOKEN) -> Settings:
    return load(flags=tiny_settings(*flags), environ={"OUTRIDER_INTERNAL_TOKEN": token})


@asynccontextmanager
async def service(model: ResolvedModel, ports: list[int], *flags: str) -> AsyncIterator[Routing]:
    """A router alone, with verifiers at those ports of loopback."""
    addresses = ",".join(f'"127.0.0.1:{port}"' for port in ports)
    settings = settings_of(f"router.verifiers=[{addresses}]", *flags)
    preflight(settings, model)
    async with routing(settings, model) as running:
        yield running


def asked(strategy: str = "autoregressive", **sampling: Any) -> ClientRequest:
    wanted = RequestedSampling(**{"max_tokens": 60, "ignore_eos": True, **sampling})
    return ClientRequest(input=PROMPT, sampling=wanted, strategy=strategy, tenant="one")


async def answer(running: Routing, wanted: ClientRequest) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in running.router.generate(wanted)]
    return [token for event in events if isinstance(event, TextChunk) for token in event.token_ids]


@pytest.mark.exhaustive
async def test_it_verifies_and_changes_no_token(tiny_model: Path, tls: list[str]) -> None:
    model, port = ResolvedModel(name="tiny", path=tiny_model), free_port()
    async with build.in_process(settings_of(), model) as alone:
        known = Routing(router=alone.router, observing=alone.observing)
        sampled: dict[str, Any] = {"temperature": 0.9, "seed": 3}
        wanted = [await answer(known, asked(**each)) for each in ({}, sampled)]
    async with service(model, [port], *tls) as running:
        assert not await running.router.ready()
        for _ in range(2):
            async with verifying(settings_of(f"verifier.port={port}", *tls), model) as address:
                assert address == f"127.0.0.1:{port}"
                for strategy in ("autoregressive", "blend", "prompt_lookup", "spectra_core"):
                    told = [await answer(running, asked(strategy, **each)) for each in ({}, sampled)]
                    assert told == wanted, strategy
                state = await running.router.service_state()
                assert state.components == {"verifier": {"running": 1}}
                await running.router.forget("one")
            assert (await running.router.service_state()).components == {"verifier": {"not answering": 1}}
            with pytest.raises(Unavailable):
                await running.router.forget("one")


@asynccontextmanager
async def process(model: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """`outrider verify` in a process of its own, and its port."""
    given = [part for flag in tiny_settings(*flags) for part in ("--set", flag)]
    command = [sys.executable, "-m", "cli", "verify", "--model", str(model), *given]
    environ = {**os.environ, "OUTRIDER_INTERNAL_TOKEN": TOKEN}
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
    try:
        assert running.stdout is not None
        line = (await asyncio.wait_for(running.stdout.readline(), PATIENCE_S)).decode()
        assert "Outrider verifies for" in line
        yield running, int(line.partition("127.0.0.1:")[2].split()[0])
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("ends", ["killed", "asked to stop"])
async def test_one_that_goes_in_mid_answer_costs_no_token(tiny_model: Path, tls: list[str], ends: str) -> None:
    model = ResolvedModel(name="tiny", path=tiny_model)
    wanted = asked("blend", max_tokens=400, temperature=0.8, seed=11)
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(verifying(settings_of(*tls), model))
        leaving, port = await stack.enter_async_context(process(tiny_model, "verifier.drain_s=0", *tls))
        running = await stack.enter_async_context(service(model, [port, int(other.rpartition(":")[2])], *tls))
        # Which of the two a request goes to depends on how it begins.
        went = 0
        for first in range(20):
            begun = replace(wanted, input=(first, *PROMPT[1:]))
            tokens: list[int] = []
            async with asyncio.timeout(PATIENCE_S), aclosing(running.router.generate(begun)) as events:
                async for event in events:
                    tokens += event.token_ids if isinstance(event, TextChunk) else []
                    if len(tokens) >= 20 and not went:
                        cards = (await running.router.service_state()).verifiers
                        if [card.running for card in cards] == [1, 0]:
                            went += 1
                            leaving.kill() if ends == "killed" else leaving.terminate()
                            await leaving.wait()
            assert len(tokens) == 400
            if went:
                break
        assert went
        # The other one took the rest over: alone, it gives the same.
        assert tokens == await answer(running, begun)
        assert (await running.router.service_state()).components == {"verifier": {"running": 1, "not answering": 1}}


@pytest.mark.examples(3)
@pytest.mark.parametrize("wrong", ["token", "authority", "role"])
async def test_a_stranger_is_refused(tiny_model: Path, tls: list[str], tmp_path: Path, wrong: str) -> None:
    model, token, theirs = ResolvedModel(name="tiny", path=tiny_model), TOKEN, tls
    if wrong == "token":
        token = "another token of sixteen"
    elif wrong == "authority":
        (folder := tmp_path / "theirs").mkdir()
        authority = trustme.CA()
        for role in ("verifier", "router"):
            write_certificates(folder, authority, role)
        theirs = tls_flags(folder)
    else:
        # A drafter's certificate of the right authority does not make a router.
        for end in ("pem", "key"):
            (tmp_path / f"router.{end}").write_bytes((tmp_path / f"drafter.{end}").read_bytes())
    async with verifying(settings_of(*tls), model) as address:
        settings = settings_of(f'router.verifiers=["{address}"]', *theirs, token=token)
        if wrong == "role":
            with refuses(ConfigurationError, field="cluster.tls.certificate", says="as the certificate of a router"):
                preflight(settings, model)
        async with routing(settings, model) as running:
            assert not await running.router.ready()


async def test_a_router_of_another_tokenizer_is_not_answered(tiny_model: Path) -> None:
    own = known_tokenizer(tiny_model)
    async with verifying(settings_of(), ResolvedModel(name="tiny", path=tiny_model)) as address:
        link = GrpcVerifierLink(address, TOKEN)
        for told in ("", own):
            wanted = replace(request("r", [1], max_tokens=2), tokenizer=told)
            assert [event async for event in link.generate(wanted)]
        with pytest.raises(NotBegun, match="another tokenizer"):
            await anext(link.generate(replace(wanted, tokenizer="0123")))
        await link.close()


@pytest.mark.exhaustive
async def test_a_verifier_that_decodes_nothing_any_more_says_so(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_verifier, "_LOOK_S", 0.01)
    lost = asyncio.Event()
    async with verifying(settings_of(), ResolvedModel(name="tiny", path=tiny_model), lost):
        await asyncio.sleep(0.1)
        assert not lost.is_set()
        monkeypatch.setattr(VerifierService, "alive", False)
        await asyncio.wait_for(lost.wait(), PATIENCE_S)


def test_what_both_sides_must_be_told(tiny_model: Path, tls: list[str]) -> None:
    model = ResolvedModel(name="tiny", path=tiny_model)
    for flags, field in (
        (['router.verifiers=["127.0.0.1:1"]'], "internal_token_file"),
        (['router.verifiers=["127.0.0.1:1", "gpu.example:50071"]', "internal_token_file=/run/token"], "cluster.tls"),
    ):
        with refuses(ConfigurationError, field=field, value="null"):
            preflight(load(flags=tiny_settings(*flags), environ={}), model)
    twice = 'router.verifiers=["127.0.0.1:1", "127.0.0.1:1"]'
    with refuses(ConfigurationError, field="router.verifiers", value="127.0.0.1:1"):
        preflight(load(flags=tiny_settings(twice, "internal_token_file=/run/token"), environ={}), model)
    with refuses(ConfigurationError, field="router.verifiers.0", value="'gpu'"):
        load(flags=['router.verifiers=["gpu"]'], environ={})
    unchecked = preflight(settings_of('router.verifiers=["gpu.example:50071"]', *tls), model)
    assert unchecked == ("the verifiers of router.verifiers, which are not asked",)


@pytest.mark.exhaustive
async def test_a_verifier_that_others_reach_asks_for_certificates(tiny_model: Path) -> None:
    model = ResolvedModel(name="tiny", path=tiny_model)
    with refuses(ConfigurationError, field="cluster.tls", value="null"):
        async with verifying(settings_of("verifier.host=0.0.0.0"), model):
            pass
    async with verifying(settings_of(), model) as address:
        with refuses(ConfigurationError, says="cannot listen on"):
            async with verifying(settings_of(f"verifier.port={address.rpartition(':')[2]}"), model):
                pass


def test_the_service_starts_routers_alone() -> None:
    settings = settings_of('router.verifiers=["127.0.0.1:50071"]', "retrieval.index=/an/index")
    assert set(components(settings)) == {"router"}
    assert {each.component for each in listeners(settings)} == {"router"}
