"""``outrider bench never-slower`` against a running service on a tiny model: loads, rounds, a wrong token, resuming."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import outrider
from benchmarks.bench.records import Prompt
from benchmarks.never_slower import run as run_module
from benchmarks.never_slower import turns as turns_module
from benchmarks.never_slower.cells import PLAIN, GridCell, grid
from benchmarks.never_slower.kinds import PromptPool
from benchmarks.never_slower.load import LoadRecord, LoadShape, Supply, keep_in_flight
from benchmarks.never_slower.own_service import OwnService, TurnClock
from benchmarks.never_slower.report import write_report
from benchmarks.never_slower.requests import LoadRequest, RequestLimits, RoundRequests
from benchmarks.never_slower.rounds import measure_round
from benchmarks.never_slower.run import NeverSlowerConfig, NeverSlowerRun
from benchmarks.never_slower.turns import OneService, OwnServices, RoundPlan
from benchmarks.never_slower.verdict import judge
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.router.tokens import Tokens
from services.verifier.engine.pause import Hold
from speculation.errors import ConfigurationError
from tests.running.patience import at_rest, until
from tests.servers.service import served, tiny_settings
from tests.tiny_models.tiny import make_tiny_model

CELL = GridCell(on="process", at_once=3, kind="open", temperature=0.0, length="short")
PLAN = RoundPlan(strategies=("blend",), seconds=0.3, lead_s=5.0, change_every_s=0.1, stretch_s=0.1)
LIMITS = RequestLimits(max_tokens=12, max_model_len=512)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def round_requests(tiny: Path, cell: GridCell = CELL) -> RoundRequests:
    return RoundRequests(PromptPool(), Tokens(str(tiny)), LIMITS, cell, 3)


async def test_a_load_keeps_requests_in_flight_and_counts_what_arrives(tiny: Path) -> None:
    async with served(tiny) as (address, running), outrider.AsyncClient(address) as client:
        shape = LoadShape(at_once=3, strategy="blend", temperature=0.0, seconds=0.5, lead_s=5.0)
        record = await keep_in_flight(client, round_requests(tiny).supply(1.0), shape)
        assert len(record.tenths) == 5
        assert record.seconds == pytest.approx(0.5)
        begun = [answer for answer in record.answers if answer.tokens]
        assert 0 < sum(record.tenths) <= sum(len(answer.tokens) for answer in begun)
        assert record.ttft_s > 0
        # At the end, what is under way and nothing else is unfinished.
        assert len([answer for answer in record.answers if not answer.finished]) <= 3
        # Cancelled requests leave the server, which goes on.
        assert (await client.generate("Once", max_tokens=3)).token_ids
        assert running.verifier is not None


async def test_a_failed_request_ends_a_load(tiny: Path) -> None:
    async with served(tiny) as (address, _), outrider.AsyncClient(address) as client:

        def too_long(_: float) -> LoadRequest:
            return LoadRequest(name="long", token_ids=(5,) * 600, seed=1, max_tokens=4)

        shape = LoadShape(at_once=2, strategy="blend", temperature=0.0, seconds=5.0, lead_s=5.0)
        with pytest.raises(outrider.InvalidArgument):
            await keep_in_flight(client, too_long, shape)


@pytest.mark.examples(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_round_compares_every_answer(tiny: Path, temperature: float) -> None:
    cell = GridCell(on="process", at_once=3, kind="open", temperature=temperature, length="short")
    async with served(tiny) as (address, _), outrider.AsyncClient(address) as client:
        turns = await measure_round(OneService(client, 3), round_requests(tiny, cell), cell, 0, PLAN)
    assert [turn.strategy for turn in turns] == [PLAIN, "blend", PLAIN]
    assert [turn.turn for turn in turns] == [0, 1, 2]
    assert all(turn.answers >= 3 and turn.speed > 0 and not turn.wrong and not turn.error for turn in turns)


def test_a_record_holds_no_password(tiny: Path, tmp_path: Path) -> None:
    run = a_run(tiny, tmp_path)
    told = {"learning_redis_url": "redis://router:secret@here", "learning_redis_password": "secret"}
    run._settings = run._settings.model_copy(update={"router": run._settings.router.model_copy(update=told)})
    record = json.dumps(run.record(partial=True))
    assert "secret" not in record and "learning" in record


@pytest.mark.exhaustive
async def test_the_servers_memory_is_emptied_before_every_turn(tiny: Path) -> None:
    async with served(tiny) as (address, running), outrider.AsyncClient(address) as client:
        asked: list[str] = []
        forget = running.router.forget

        async def forgetting(tenant: str) -> None:
            asked.append(tenant)
            await forget(tenant)

        running.router.forget = forgetting  # type: ignore[method-assign]
        await measure_round(OneService(client, 3), round_requests(tiny), CELL, 0, PLAN)
    assert asked == ["", "", ""]


async def test_a_planted_wrong_token_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def with_a_wrong_token(client: outrider.AsyncClient, supply: Supply, shape: LoadShape) -> LoadRecord:
        record = await keep_in_flight(client, supply, shape)
        if shape.strategy == "blend":
            # The last answer is the likeliest to have been reached by no other contestant.
            last = [answer for answer in record.answers if answer.tokens][-1]
            last.tokens[-1] += 1
        return record

    monkeypatch.setattr(turns_module, "keep_in_flight", with_a_wrong_token)
    async with served(tiny) as (address, _), outrider.AsyncClient(address) as client:
        turns = await measure_round(OneService(client, 3), round_requests(tiny), CELL, 0, PLAN)
    assert [len(turn.wrong) for turn in turns] == [0, 1, 0]
    assert "instead of" in turns[1].wrong[0]
    assert judge(turns).word == "no"


class HeldHere:
    """A held service in this process."""

    def __init__(self, client: outrider.AsyncClient, hold: Hold) -> None:
        self.client, self.clock, self._hold = client, TurnClock(), hold
        self.said: list[str] = []

    async def hold(self) -> None:
        await self._hold.begin()
        self.clock.stop()
        self.said.append("hold")

    async def go(self) -> None:
        self.clock.start()
        self._hold.end()
        self.said.append("go")


@asynccontextmanager
async def held_services(tiny: Path, count: int) -> AsyncIterator[list[HeldHere]]:
    async with AsyncExitStack() as stack:
        services = []
        for _ in range(count):
            address, running = await stack.enter_async_context(served(tiny))
            client = await stack.enter_async_context(outrider.AsyncClient(address))
            services.append(HeldHere(client, running.verifier.loop.hold))
        yield services


async def test_a_held_service_stops_between_two_passes_and_goes_on(tiny: Path) -> None:
    async with held_services(tiny, 1) as (service,):
        plainly = await service.client.generate("Once", max_tokens=200, ignore_eos=True)
        arrivals: list[int] = []

        async def asked() -> None:
            async with service.client.stream("Once", max_tokens=200, ignore_eos=True) as stream:
                async for chunk in stream:
                    arrivals.extend(chunk.token_ids)

        task = asyncio.create_task(asked())
        await until(lambda: len(arrivals) > 2)
        await service.hold()
        # What the last pass gave may still be on its way.
        so_far, _ = await at_rest(lambda: (len(arrivals), service.clock()))
        assert so_far < 200
        await service.go()
        await task
        assert tuple(arrivals) == tuple(plainly.token_ids)
        # A loop without requests stands still at once.
        await service.hold()
        await service.go()


@pytest.mark.exhaustive
async def test_contestants_with_services_of_their_own_take_turns(tiny: Path) -> None:
    async with held_services(tiny, 3) as services:
        turns = await measure_round(OwnServices(services), round_requests(tiny), CELL, 1, PLAN)
        assert [service.said for service in services] == [["hold", *["go", "hold"] * 4, "go"]] * 3
        # Nothing is left behind, and all go on.
        assert all([(await service.client.generate("Once", max_tokens=3)).token_ids for service in services])
    assert [turn.strategy for turn in turns] == [PLAIN, "blend", PLAIN]
    assert all(turn.answers >= 3 and turn.speed > 0 and not turn.wrong and not turn.error for turn in turns)
    assert all(len(turn.tenths) == 3 for turn in turns)


@pytest.mark.exhaustive
async def test_a_contestant_that_fails_leaves_the_others_their_turns(tiny: Path) -> None:
    plan = RoundPlan(strategies=("retrieval",), seconds=0.2, lead_s=5.0, stretch_s=0.1)
    async with held_services(tiny, 3) as services:
        turns = await measure_round(OwnServices(services), round_requests(tiny), CELL, 0, plan)
    assert [bool(turn.error) for turn in turns] == [False, True, False]
    assert all(turn.speed > 0 for turn in turns if not turn.error)


@pytest.mark.exhaustive
async def test_a_service_in_a_process_of_its_own(tiny: Path) -> None:
    settings = load(flags=tiny_settings(f"model={tiny}", "server.port=0", "server.http_port=null", "server.ops_port=null"))
    model = ResolvedModel(name="tiny", path=tiny)
    service = await OwnService.start(settings, model)
    try:
        await service.hold()
        asked = asyncio.create_task(service.client.generate("Once", max_tokens=3))
        await asyncio.sleep(0.2)
        assert not asked.done()
        await service.go()
        assert (await asked).token_ids
    finally:
        await service.close()
    with pytest.raises(ConfigurationError, match="nowhere"):
        await OwnService.start(settings, ResolvedModel(name="tiny", path=tiny / "nowhere"))


@pytest.mark.exhaustive
async def test_a_strategy_that_is_refused_fails_its_turn_alone(tiny: Path) -> None:
    plan = RoundPlan(strategies=("retrieval", "blend"), seconds=0.2, lead_s=5.0)
    async with served(tiny) as (address, _), outrider.AsyncClient(address) as client:
        turns = await measure_round(OneService(client, 4), round_requests(tiny), CELL, 0, plan)
    assert [bool(turn.error) for turn in turns] == [False, True, False, False]
    verdict = judge(turns)
    assert verdict.cells[0].strategy == "retrieval"
    assert verdict.cells[0].state.startswith("failed: ")


def a_run(tiny: Path, folder: Path, **changed: Any) -> NeverSlowerRun:
    given: dict[str, Any] = {
        "source": "some file",
        "prompts": tuple(Prompt(id=str(n), task="qa", turns=(f"What is {n}?",)) for n in range(3)),
        "cells": grid((1, 2), ("open", "changing"), (0.0,), ("short", "4k"), ("process",)),
        "plan": PLAN,
        "repeats": 2,
        "max_tokens": 12,
        "seed": 1,
    }
    settings = load(flags=tiny_settings(f"model={tiny}"), environ={})
    model = ResolvedModel(name="tiny", path=tiny)
    return NeverSlowerRun(NeverSlowerConfig(**{**given, **changed}), settings, model, folder, Console(file=io.StringIO()))


@pytest.mark.exhaustive
def test_an_interrupted_run_keeps_whole_rounds_and_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Changing prompts go through all kinds, and a byte-level tokeniser makes many tokens of them.
    tiny = make_tiny_model(tmp_path_factory.mktemp("roomy"), max_position_embeddings=2048)
    # As with a drafter that contestants would have to share: then they share all.
    monkeypatch.setattr(run_module, "_may_be_many", lambda settings: False)
    measured = measure_round
    done = 0

    async def interrupted(*given: Any) -> Any:
        nonlocal done
        if done == 2:
            raise KeyboardInterrupt
        done += 1
        return await measured(*given)

    monkeypatch.setattr(run_module, "measure_round", interrupted)
    cells = grid((1, 2), ("open", "translation"), (0.0,), ("short", "4k"), ("process",))
    first = a_run(tiny, tmp_path, cells=cells)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    kept = json.loads((tmp_path / "results.json").read_text())
    assert len(kept["turns"]) == 2 * 3
    assert kept["partial"]

    monkeypatch.setattr(run_module, "measure_round", measured)
    with pytest.raises(ConfigurationError, match="max_tokens was 12 and is 10"):
        a_run(tiny, tmp_path, cells=cells, max_tokens=10).resume()
    second = a_run(tiny, tmp_path, cells=cells)
    second.resume()
    second.run()
    assert [turn.as_object() for turn in second.turns[:6]] == [turn.as_object() for turn in first.turns]
    # Four short cells, two repeats, three turns; long prompts do not fit.
    assert len(second.turns) == 4 * 2 * 3
    assert len(second.left_out) == 4
    assert second.exact
    assert not any(turn.wrong or turn.error for turn in second.turns)

    record, verdict = second.record(partial=False), judge(second.turns)
    assert len(verdict.cells) == 4
    # Turns of less than a second have no slowest one.
    assert all(math.isnan(cell.slowest_second) for cell in verdict.cells)
    write_report(record, verdict, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == len(list((tmp_path / "plots").glob("*.svg"))) == 1
    assert "a server forgets all requests before every round" in page
    assert "some file: 3 open; then built-in ones" in page
