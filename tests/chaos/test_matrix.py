"""A few cells of the chaos matrix, with real processes; and the checker must see what is wrong with a history.

All cells: ``python -m tests.chaos.matrix --out FOLDER``, some twenty minutes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.relay import Relay
from tests.chaos import history
from tests.chaos.cells import ALL, ASKED, CHAIN, NEW_COMPONENT_CERTIFICATES, OVERLOAD, Cell, Plan, plain_answers
from tests.chaos.history import AFTERWARDS, DONE, FAILED, FAULT, TOKENS, UNSETTLED, History, Record, violations
from tests.chaos.in_processes import arranged
from tests.chaos.matrix import replay
from tests.chaos.outcomes import Outcome, table
from tests.chaos.users import run_plan

CELLS = [
    Cell("verifier", "killed", "in mid-stream"),
    Cell("verifier", "cut", "at the end"),
    Cell("verifier", "stalled", "before the first token"),
    Cell("drafter", "killed", "in mid-stream"),
    Cell("drafter", "no disk", "in mid-stream"),
    Cell("retrieval", "frozen", "in mid-stream"),
    Cell("redis", "cut", "in mid-stream"),
    Cell("redis", "killed", "in mid-stream", "new index"),
    Cell("verifier", "no memory", "in mid-stream"),
    Cell("drafter", "no descriptors", "in mid-stream"),
    Cell("retrieval", "no memory", "in mid-stream", "new index"),
    Cell("verifier", "killed", "in mid-stream", OVERLOAD),
    Cell("router", "no descriptors", "in mid-stream", "new keys"),
    Cell("router", "no threads", "in mid-stream", "new certificate"),
    Cell("drafter", "no descriptors", "in mid-stream", NEW_COMPONENT_CERTIFICATES),
    Cell("verifier", "frozen", "in mid-stream", NEW_COMPONENT_CERTIFICATES),
    Cell("router", "killed", "in mid-stream"),
]
# gRPC's own time limit of a ping is a minute.
HUNG_S = 50.0
EXPECTED = {"a": (1, 2, 3), "b": (4, 5)}


def told(*events: tuple[str, str, tuple[int, ...]]) -> list[str]:
    found = History()
    for kind, stream, tokens in events:
        found.add(kind, stream, tokens, text="Unavailable: why" if kind == FAILED else "")
    return violations(found.events, EXPECTED)


B = ((TOKENS, "b", (4, 5)), (DONE, "b", ()))


def test_the_checker_accepts_what_is_right() -> None:
    assert not told((TOKENS, "a", (1,)), (FAULT, "", ()), (TOKENS, "a", (2, 3)), (DONE, "a", ()), *B)
    assert not told((TOKENS, "a", (1,)), (FAILED, "a", ()), *B)
    assert not told((FAILED, "a", ()), *B)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([(TOKENS, "a", (1, 3)), (DONE, "a", ())], "other tokens"),
        ([(TOKENS, "a", (1, 2)), (TOKENS, "a", (2, 3)), (DONE, "a", ())], "other tokens"),
        ([(TOKENS, "a", (1, 2, 3, 4)), (DONE, "a", ())], "other tokens"),
        ([(TOKENS, "a", (1, 2)), (DONE, "a", ())], "ended as a whole after 2 of 3"),
        ([(TOKENS, "a", (1, 2, 3))], "a: no end"),
        ([(TOKENS, "a", (1, 2, 3)), (DONE, "a", ()), (FAILED, "a", ())], "failed after its end"),
        ([(FAILED, "a", ()), (TOKENS, "a", (1,))], "tokens after its end"),
        ([(FAILED, "a", ()), (TOKENS, "c", (1,))], "nobody asked"),
    ],
)
def test_the_checker_sees_what_is_wrong(events: list[tuple[str, str, tuple[int, ...]]], words: str) -> None:
    assert any(words in line for line in told(*events, *B))


def test_what_is_not_as_it_was_is_seen() -> None:
    seen = History()
    for kind, stream, tokens in (*B, (TOKENS, "a", (1, 2, 3)), (DONE, "a", ())):
        seen.add(kind, stream, tokens)
    assert violations(seen.events, EXPECTED) == []
    seen.add(UNSETTLED, text="router 1: the revoked key is accepted")
    assert violations(seen.events, EXPECTED) == ["router 1: the revoked key is accepted"]


def recorded(*events: tuple[float, str, str]) -> Record:
    made = [history.Event(at, kind, stream, EXPECTED["a"] if kind == TOKENS else (), "why") for at, kind, stream in events]
    plan = Plan.drawn(Cell("verifier", "killed", "in mid-stream"), "processes", 7)
    return Record(plan, {"a": EXPECTED["a"], AFTERWARDS: EXPECTED["a"]}, made)


def test_a_record_can_be_judged_without_what_it_came_from(tmp_path: Path) -> None:
    record = recorded((1, FAULT, ""), (3, TOKENS, "a"), (3.5, DONE, "a"), (5, TOKENS, AFTERWARDS), (5, DONE, AFTERWARDS))
    record.save(tmp_path / "record.jsonl")
    again = history.read(tmp_path / "record.jsonl")
    assert again == record
    assert Outcome.of(again) == Outcome(broken=[], streams=1, failed=0, pause_s=2.0, recovery_s=4.0)
    assert "| verifier | killed |  | 1 | all | 0 of 1 | 2.0 s | 4.0 s |" in table([again])


def test_a_service_that_does_not_come_back_is_not_right() -> None:
    record = recorded((1, FAULT, ""), (3, TOKENS, "a"), (3.5, DONE, "a"), (61, FAILED, AFTERWARDS))
    outcome = Outcome.of(record)
    assert not outcome.right and not outcome.broken
    assert outcome.failed == 0


def test_a_seed_draws_one_plan() -> None:
    cell = Cell("verifier", "killed", "in mid-stream")
    plan = Plan.drawn(cell, "processes", 7)
    assert plan == Plan.drawn(cell, "processes", 7)
    assert len({Plan.drawn(cell, "processes", seed).after for seed in range(20)}) > 3
    assert Plan.drawn(Cell("verifier", "killed", "before the first token"), "processes", 7).after == 0


async def test_a_relay_passes_on_cuts_and_stalls() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay([1, server.sockets[0].getsockname()[1]])
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"a")
    assert await reader.read(1) == b"a"
    relay.stall()
    writer.write(b"b")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    relay.heal()
    assert await reader.read(1) == b"b"
    relay.cut()
    assert await reader.read(1) == b""
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    assert await reader.read(1) == b""
    await relay.stop()
    server.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_streams_are_right_or_end_in_one_error(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(CELLS) <= set(ALL)
    expected = await plain_answers(tiny_model)
    async with arranged(tiny_model) as arrangement:
        for cell in CELLS:
            record = await run_plan(arrangement, Plan.drawn(cell, arrangement.place, 0), expected)
            outcome = Outcome.of(record)
            assert outcome.right, (cell, outcome)
            # Only routers hold what cannot go on elsewhere.
            said = [event.text for event in record.events if event.kind == FAILED]
            assert outcome.failed <= (len(ASKED) + 1 if cell.component == CHAIN[-1] else 0), (cell, said)
        # One that hangs behind an open connection is noticed by pings, one of these two being the one that decodes.
        hung = Plan.drawn(Cell("verifier", "hung", "in mid-stream"), arrangement.place, 0)
        for victim in (0, 1):
            outcome = Outcome.of(await run_plan(arrangement, replace(hung, victim=victim), expected))
            assert outcome.right and not outcome.failed and outcome.pause_s < HUNG_S, outcome
        # The last one is run again from its record; one that breaks a promise is found out.
        record.save(tmp_path / "record.jsonl")
        assert await replay(history.read(tmp_path / "record.jsonl"), arrangement, expected)
        shown = capsys.readouterr().out
        assert str(record.plan) in shown and shown.count("| router | killed | in mid-stream |  | yes |") == 2
        cut_off = Record(record.plan, record.expected, [each for each in record.events if each.kind != DONE])
        assert not await replay(cut_off, arrangement, expected)
        assert "afterwards: no end" in capsys.readouterr().out
