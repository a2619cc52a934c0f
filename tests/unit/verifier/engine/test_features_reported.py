"""Hidden states on their way to drafters: every committed position once, prompts too, again for whoever joins late."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace

import pytest

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.kept_features import KeptFeatures, pieces, rows_from
from speculation import limits
from speculation.columns import SentReports
from speculation.messages import FeatureChunk, OpenSession, StepReport
from speculation.ports import DraftReceiver
from speculation.sources import SOURCES, SourceSpec
from speculation.types import Features, Plan
from tests.engine.fakes import RandomDrafter, ToyTarget, collect, decoding, origin, request
from tests.running.patience import PATIENCE_S

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
PLAN = Plan(strategy="test", sources=("seer", "blind"), max_nodes=6, observe_layers=(-1,), observe_prompt=True)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "seer", SourceSpec(name="seer", layers=(-1,), prompt_features=True))
    monkeypatch.setitem(SOURCES, "blind", SourceSpec(name="blind"))


class Seer:
    """A link to a good drafter. It writes down the token that the toy target packs into each position's hidden state."""

    def __init__(self) -> None:
        self._link = InProcessDraftLink(RandomDrafter(mood="good"))
        self.forget, self.close, self.stop = self._link.forget, self._link.close, self._link.stop
        self.seen: dict[int, int] = {}
        self.twice: set[int] = set()
        self.text: list[int] = []
        self.most_bytes = 0

    @property
    def connected(self) -> bool:
        return self._link.connected

    async def start(self, receiver: DraftReceiver) -> None:
        self.reconnect = receiver.on_connected
        await self._link.start(receiver)

    def _see(self, features: Features) -> None:
        self.most_bytes = max(self.most_bytes, len(features.data))
        numbers = struct.unpack(f"<{2 * features.rows}e", features.data)
        for row in range(features.rows):
            at = features.start + row
            if at in self.seen:
                self.twice.add(at)
            self.seen[at] = int(numbers[2 * row])

    def features(self, message: FeatureChunk) -> None:
        assert self.text, "before its session is opened"
        self._see(message.features)

    def open(self, message: OpenSession) -> None:
        self.seen, self.twice, self.text = {}, set(), list(message.tokens)
        self._link.open(message)

    def step(self, message: StepReport) -> None:
        if message.observation is not None and message.observation.features is not None:
            self._see(message.observation.features)
        self.text += message.committed
        self._link.step(message)

    def steps(self, reports: SentReports) -> None:
        for report in reports.alone():
            self.step(report)

    def check(self) -> None:
        """Everything was seen but the hidden state of the last tokens, which were not reported or not computed."""
        assert set(range(max(self.seen) + 1)) == set(self.seen)
        assert len(self.seen) >= len(self.text) - 1
        assert all(self.text[at] == token for at, token in self.seen.items() if at < len(self.text))


@pytest.mark.parametrize("most_bytes", [limits.MAX_FEATURE_BYTES, 8])
async def test_every_committed_position_is_told_once(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FEATURE_BYTES", most_bytes)
    seer, blind = Seer(), Seer()
    origins = [
        origin(seer, "seer", sources=["seer"]),
        origin(blind, "blind", sources=["blind"]),
    ]
    # A prompt in three chunks.
    async with decoding(ToyTarget(), *origins, max_batched_tokens=4) as loop:
        await collect(loop, request("r", PROMPT, PLAN, max_tokens=40, ignore_eos=True))
    seer.check()
    assert not seer.twice
    assert seer.most_bytes <= most_bytes
    assert blind.seen == {}


async def test_a_prompt_is_told_only_where_it_is_asked_for() -> None:
    seer = Seer()
    async with decoding(ToyTarget(), seer, max_batched_tokens=4) as loop:
        plan = replace(PLAN, observe_prompt=False)
        await collect(loop, request("r", PROMPT, plan, max_tokens=20, ignore_eos=True))
    # The last token of the prompt is the one from which the first answer is chosen.
    assert min(seer.seen) == len(PROMPT) - 1
    assert not seer.twice


async def test_who_steps_back_tells_nothing_twice() -> None:
    seers = Seer(), Seer()
    target = ToyTarget(rows=120)
    origins = [origin(seer, name, sources=[name]) for seer, name in zip(seers, "ab", strict=True)]
    for name in "ab":
        SOURCES[name] = replace(SOURCES["seer"], name=name)
    try:
        async with decoding(target, *origins) as loop:
            asked = [request(name, PROMPT, replace(PLAN, sources=(name,)), max_tokens=60, ignore_eos=True) for name in "ab"]
            await asyncio.gather(*(collect(loop, one) for one in asked))
            assert loop.stats.preemptions > 0
    finally:
        for name in "ab":
            del SOURCES[name]
    for seer in seers:
        seer.check()
        assert not seer.twice


@pytest.mark.parametrize("kept", [1 << 20, 40])
async def test_who_joins_late_is_told_all_that_is_kept(kept: int) -> None:
    seer, target = Seer(), ToyTarget()
    target.delay_s = 0.002
    async with decoding(target, seer, kept_feature_bytes=kept) as loop:
        task = asyncio.create_task(collect(loop, request("r", PROMPT, PLAN, max_tokens=200, ignore_eos=True)))
        async with asyncio.timeout(PATIENCE_S):
            while len(seer.seen) < 60:
                await asyncio.sleep(0.001)
            before = dict(seer.seen)
            seer.reconnect()
            assert kept == 40 or seer.seen == before, "at once"
        await task
    known = set(seer.seen)
    assert all(seer.text[at] == token for at, token in seer.seen.items() if at < len(seer.text))
    if kept == 40:
        # Ten rows of four bytes: the latest.
        assert 0 < len(set(before) & known) <= 10
        assert min(known) > 0
    else:
        seer.check()
    assert not seer.twice


def features(start: int, rows: int, width: int = 3) -> Features:
    data = b"".join(bytes([start + row]) * 2 * width for row in range(rows))
    return Features(data=data, rows=rows, width=width, dtype="float16", start=start)


def test_pieces_hold_the_same_rows_in_fewer_messages() -> None:
    whole = [features(0, 4), features(4, 1), features(5, 7), features(20, 2)]
    for most in (6, 7, 13, 30, 1000):
        found = list(pieces(whole, most))
        rows = {each.start + row: each.data[row * 6 : row * 6 + 6] for each in found for row in range(each.rows)}
        assert rows == {at: bytes([at]) * 6 for at in [*range(12), 20, 21]}
        assert sum(each.rows for each in found) == 14
        assert all(len(each.data) <= max(most, 6) for each in found)
    assert [each.rows for each in pieces(whole, 1000)] == [12, 2]
    # A row is never cut.
    assert [each.rows for each in pieces([features(0, 3)], 1)] == [1, 1, 1]
    assert list(pieces([], 10)) == []


def test_rows_that_are_known_are_left_out() -> None:
    assert rows_from(features(3, 4), 0) == features(3, 4)
    assert rows_from(features(3, 4), 5) == features(5, 2)
    assert rows_from(features(3, 4), 7) is None


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    kept = KeptFeatures(60)
    kept.add("a", features(0, 4))
    kept.add("b", features(0, 5))
    assert kept.of("a") == [features(0, 4)]
    kept.add("b", features(5, 2))
    assert kept.of("a") == []
    assert kept.of("b") == [features(0, 5), features(5, 2)]
    kept.drop("b")
    kept.drop("unknown")
    assert kept.of("b") == []
    kept.add("c", features(0, 10))
    assert len(kept.of("c")) == 1
    kept.add("d", features(0, 11))
    assert kept.of("c") == kept.of("d") == []
