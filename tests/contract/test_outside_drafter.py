"""A drafter outside of the service, by gRPC with mutual TLS: it drafts, forgets, comes and goes, and changes no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from cluster.build import Pipeline, in_process
from cluster.checks.listeners import listeners
from cluster.checks.preflight import preflight
from cluster.models.target import ResolvedModel
from cluster.outside.drafter import drafting
from cluster.ray.resources import components
from cluster.settings.config import Settings, load
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from speculation.errors import ConfigurationError, Unavailable
from tests.running.patience import PATIENCE_S, until
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
    for role in ("drafter", "verifier"):
        write_certificates(tmp_path, authority, role)
    return tls_flags(tmp_path)


def of_service(tls: list[str], folder: Path) -> list[str]:
    """The settings of a service, which has neither the drafter's certificate nor the token but in a file."""
    (own := folder / "of the service").mkdir()
    for name in ("verifier.pem", "verifier.key", "authority.pem"):
        (own / name).write_bytes((folder / name).read_bytes())
    (own / "token").write_text(f"{TOKEN}\n")
    return [*(each.replace(str(folder), str(own)) for each in tls), f"internal_token_file={own / 'token'}"]


def settings_of(*flags: str) -> Settings:
    return load(flags=tiny_settings(*flags), environ={"OUTRIDER_INTERNAL_TOKEN": TOKEN})


@asynccontextmanager
async def service(model: ResolvedModel, port: int, *flags: str) -> AsyncIterator[Pipeline]:
    """A service whose drafter is at that port of loopback."""
    named = [f"drafter.address=127.0.0.1:{port}", "drafter.trusted=false", *flags]
    settings = load(flags=tiny_settings(*named), environ={})
    preflight(settings, model)
    async with in_process(settings, model) as running:
        yield running


async def answer(running: Pipeline, strategy: str) -> list[int]:
    sampling = RequestedSampling(max_tokens=60, ignore_eos=True)
    request = ClientRequest(input=PROMPT, sampling=sampling, strategy=strategy, tenant="one")
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in running.router.generate(request)]
    return [token for event in events if isinstance(event, TextChunk) for token in event.token_ids]


def drafts(running: Pipeline) -> int:
    return running.verifier.loop.stats.drafts_used


async def test_it_drafts_and_changes_no_token(tiny_model: Path, tls: list[str], tmp_path: Path) -> None:
    model, port = ResolvedModel(name="tiny", path=tiny_model), free_port()
    async with service(model, port, *of_service(tls, tmp_path)) as running:
        plain = await answer(running, "autoregressive")
        # Before it comes, answers are the same, without drafts.
        assert await answer(running, "prompt_lookup") == plain
        assert drafts(running) == 0
        with pytest.raises(Unavailable, match="the drafter"):
            await running.verifier.forget("one")
        for _ in range(2):
            async with drafting(settings_of(f"drafter.port={port}", *tls), model) as address:
                assert address == f"127.0.0.1:{port}"
                before = drafts(running)
                async with asyncio.timeout(PATIENCE_S):
                    while drafts(running) == before:
                        assert await answer(running, "prompt_lookup") == plain
                await running.verifier.forget("one")
            # It is gone, and nothing else happens.
            await until(lambda: not any(o.link.connected for o in running.verifier.loop._drafting._origins.values()))
            assert await answer(running, "prompt_lookup") == plain


@pytest.mark.examples(3)
@pytest.mark.parametrize("wrong", ["token", "authority", "role"])
async def test_a_stranger_gets_no_text(tiny_model: Path, tls: list[str], wrong: str, tmp_path: Path) -> None:
    model, port = ResolvedModel(name="tiny", path=tiny_model), free_port()
    theirs, token = tls, TOKEN
    if wrong == "token":
        token = "another token of sixteen"
    else:
        (folder := tmp_path / "theirs").mkdir()
        authority = trustme.CA()
        for role in ("drafter", "verifier"):
            write_certificates(folder, authority, role)
        theirs = tls_flags(folder)
    if wrong == "role":
        # A verifier's certificate of the right authority does not make a drafter.
        theirs = [each.replace("{role}", "verifier") for each in tls]
    flags = tiny_settings(f"drafter.port={port}", *theirs)
    stranger = load(flags=flags, environ={"OUTRIDER_INTERNAL_TOKEN": token})
    if wrong == "role":
        with refuses(ConfigurationError, field="cluster.tls.certificate", says="as the certificate of a drafter"):
            async with drafting(stranger, model):
                pass
        return
    async with drafting(stranger, model), service(model, port, *of_service(tls, tmp_path)) as running:
        plain = await answer(running, "autoregressive")
        await asyncio.sleep(0.5)
        assert await answer(running, "prompt_lookup") == plain
        assert drafts(running) == 0


def test_what_both_sides_must_be_told(tiny_model: Path, tls: list[str]) -> None:
    model = ResolvedModel(name="tiny", path=tiny_model)
    for flags, field in (
        (["drafter.address=127.0.0.1:1"], "internal_token_file"),
        (["drafter.address=drafts.example:50061", "internal_token_file=/run/token"], "cluster.tls"),
    ):
        with refuses(ConfigurationError, field=field, value="null"):
            preflight(load(flags=tiny_settings(*flags), environ={}), model)
    preflight(settings_of("drafter.address=drafts.example:50061", *tls), model)


@pytest.mark.exhaustive
async def test_a_drafter_that_others_reach_asks_for_certificates(tiny_model: Path) -> None:
    model = ResolvedModel(name="tiny", path=tiny_model)
    with refuses(ConfigurationError, field="cluster.tls", value="null"):
        async with drafting(settings_of("drafter.host=0.0.0.0"), model):
            pass
    async with drafting(settings_of(), model) as address:
        with refuses(ConfigurationError, says="cannot listen on"):
            async with drafting(settings_of(f"drafter.port={address.rpartition(':')[2]}"), model):
                pass


def test_the_service_starts_no_drafter_of_its_own() -> None:
    settings = settings_of("drafter.address=127.0.0.1:50061", "retrieval.index=/an/index")
    assert set(components(settings)) == {"router", "verifier"}
    assert not {each.component for each in listeners(settings)} & {"drafter", "retrieval"}
