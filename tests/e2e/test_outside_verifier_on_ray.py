"""Routers on Ray in front of a verifier that is outside of it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import outrider
from cluster.models.target import ResolvedModel
from cluster.outside.verifier import verifying
from cluster.settings.config import load
from tests.servers.on_ray import Service
from tests.servers.service import tiny_settings

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


def test_the_service_starts_routers_alone_and_answers(tiny_model: Path, tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text("a token of sixteen")
    flags = tiny_settings(f"internal_token_file={token}")
    found: list[str] = []
    up, down = threading.Event(), asyncio.Event()

    async def verify() -> None:
        async with verifying(load(flags=flags, environ={}), ResolvedModel(name="tiny", path=tiny_model)) as address:
            found.append(address)
            up.set()
            await down.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(verify(),), daemon=True)
    thread.start()
    assert up.wait(60)
    service = Service(tiny_model, [*flags, f'router.verifiers=["{found[0]}"]', "server.port=0"])
    try:
        assert set(service.states()) == {"router"}
        with outrider.Client(service.address) as client:
            answers = {
                strategy: client.generate(
                    "the fox the fox", max_tokens=24, seed=3, temperature=0.8, strategy=strategy
                ).token_ids
                for strategy in ("autoregressive", "blend")
            }
        assert answers["blend"] == answers["autoregressive"] and answers["blend"]
    finally:
        service.stop()
        loop.call_soon_threadsafe(down.set)
        thread.join(60)
        loop.close()
