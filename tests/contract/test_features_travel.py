"""Hidden states on their way to a drafter, over both links: what comes of them is compared for equality."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest
from typing_extensions import override

from services.links.call_queue import CallQueue
from speculation import limits
from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.ports import Drafter, DraftLink
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import Features, Observation, TokenTree
from tests.contract.test_draft_links import Recorder, in_process, over_grpc
from tests.engine.fakes import RandomDrafter
from tests.running.patience import PATIENCE_S, until

Connect = Callable[[Drafter], AbstractAsyncContextManager[tuple[DraftLink, Recorder]]]
BOTH = pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])

LAYERS, HIDDEN, SESSIONS = (2, 17, -1), 24, 16
NUMBERS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def states(session: int, first: int, last: int, dtype: str = "float16") -> Features:
    """Of positions ``first`` to ``last``: other numbers for every session, position and layer."""
    numbers = [
        np.random.default_rng((session, position)).integers(0, 2**15, len(LAYERS) * HIDDEN)
        for position in range(first, last)
    ]
    data = np.array(numbers).astype(NUMBERS[dtype]).tobytes()
    return Features(data=data, rows=last - first, width=len(LAYERS) * HIDDEN, dtype=dtype, start=first, layers=LAYERS)


class FeatureDrafter:
    """Reads hidden states of three layers and drafts for ``together`` sessions at once, some time after it was asked.

    Its draft is a digest of all rows that it knows of the prefix: one that is missing, moved or damaged shows.
    """

    def __init__(self, together: int = 1) -> None:
        self.together = together
        self.rows: dict[str, dict[int, bytes]] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.arrived: list[Features] = []
        self.largest = 0
        self.batches: list[int] = []
        self._asked: dict[str, asyncio.Future[Draft]] = {}
        self.held: asyncio.Event | None = None

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        self.rows[message.session_id] = {}
        self.tokens[message.session_id] = message.tokens
        return None

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        self.tokens[message.session_id] += message.committed
        if message.observation is not None and message.observation.features is not None:
            self.features(FeatureChunk(session_id=message.session_id, features=message.observation.features))
        return None

    def features(self, message: FeatureChunk) -> None:
        features = message.features
        self.arrived.append(features)
        size = len(features.data) // features.rows
        for row in range(features.rows):
            self.rows[message.session_id][features.start + row] = features.data[row * size : (row + 1) * size]

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        answer = self._asked[session_id] = asyncio.get_running_loop().create_future()
        if len(self._asked) == self.together:
            self.batches.append(len(self._asked))
            for name, waiting in self._asked.items():
                waiting.set_result(self._draft(name))
            self._asked = {}
        yield await answer

    def _draft(self, session_id: str) -> Draft:
        tokens, rows = self.tokens[session_id], self.rows[session_id]
        known = b"".join(rows[position] for position in range(len(tokens)) if position in rows)
        drafted = tuple(hashlib.sha256(known).digest()[:6])
        tree = TokenTree(tokens=drafted, parents=tuple(range(-1, 5)), sources=("double",) * 6)
        return Draft(
            session_id=session_id,
            base_length=len(tokens),
            base_hash=extend_hash(EMPTY_HASH, tokens),
            tree=tree,
            group="double",
        )

    def close(self, message: CloseSession) -> None:
        self.rows.pop(message.session_id, None)

    async def forget(self, message: ForgetTenant) -> None:
        if self.held is not None:
            await self.held.wait()


def opening(session: int, tokens: tuple[int, ...]) -> OpenSession:
    return OpenSession(session_id=f"s{session}", tokens=tokens, prompt_length=len(tokens), sources=("double",), max_nodes=8)


def report(session: int, tokens: tuple[int, ...], committed: int, features: Features | None) -> StepReport:
    return StepReport(
        session_id=f"s{session}",
        committed=tokens[-committed:],
        length=len(tokens),
        prefix_hash=extend_hash(EMPTY_HASH, tokens),
        accepted_path=(),
        max_nodes=8,
        observation=Observation(features=features),
    )


async def replies(recorder: Recorder, count: int) -> list[object]:
    """So many, by session."""
    found = [await recorder.replies.get() for _ in range(count)]
    return sorted(found, key=lambda reply: reply.session_id)  # type: ignore[union-attr]


async def drafts_for_all(link: DraftLink, recorder: Recorder) -> list[object]:
    """Sessions whose prompts are told in two chunks each, then two steps; three drafts for each."""
    prompts = [tuple(range(session, session + 12)) for session in range(SESSIONS)]
    for session, prompt in enumerate(prompts):
        link.open(opening(session, prompt))
    seen = await replies(recorder, SESSIONS)
    for first, last in ((0, 8), (8, 12)):
        for session in range(SESSIONS):
            link.features(FeatureChunk(session_id=f"s{session}", features=states(session, first, last)))
    for committed in ((90, 91, 92), (93,)):
        for session in range(SESSIONS):
            before = len(prompts[session])
            prompts[session] += committed
            # A step's rows are those that its tokens were chosen from.
            observed = states(session, before, before + len(committed))
            link.step(report(session, prompts[session], len(committed), observed))
        seen += await replies(recorder, SESSIONS)
    return seen


async def test_a_source_of_three_layers_drafts_for_16_sessions_at_once_and_alike_over_both_links() -> None:
    observed = []
    for connect in (in_process, over_grpc):
        drafter = FeatureDrafter(together=SESSIONS)
        async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
            observed.append(await drafts_for_all(link, recorder))
        assert drafter.batches == [SESSIONS] * 3
        assert {features.layers for features in drafter.arrived} == {LAYERS}
    assert len(observed[0]) == 3 * SESSIONS
    assert observed[0] == observed[1]
    # Before any row is there all drafts are the same; afterwards each is another one, by its session's own rows.
    drafted = [reply.tree.tokens for reply in observed[0]]  # type: ignore[attr-defined]
    assert len(set(drafted[:SESSIONS])) == 1
    assert len(set(drafted)) == 1 + 2 * SESSIONS


@BOTH
@pytest.mark.parametrize("dtype", NUMBERS)
async def test_the_numbers_arrive_as_they_are(connect: Connect, dtype: str) -> None:
    drafter, sent = FeatureDrafter(), states(3, 2, 9, dtype)
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 12))
        link.features(FeatureChunk(session_id="s0", features=sent))
        await recorder.replies.get()
        await until(lambda: bool(drafter.arrived))
        assert drafter.arrived == [sent]


async def test_within_one_process_nothing_is_copied() -> None:
    drafter, chunk, observed = FeatureDrafter(), states(0, 0, 4), states(0, 4, 5)
    async with in_process(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 4))
        link.features(FeatureChunk(session_id="s0", features=chunk))
        link.step(report(0, (1,) * 5, 1, observed))
        await recorder.replies.get()
        await until(lambda: len(drafter.arrived) == 2)
    assert drafter.arrived[0].data is chunk.data
    assert drafter.arrived[1].data is observed.data


def large(rows: int, start: int = 0) -> Features:
    """``rows`` of 48 KiB."""
    data = b"".join(bytes([start + row]) * (48 << 10) for row in range(rows))
    return Features(data=data, rows=rows, width=24 << 10, dtype="bfloat16", start=start, layers=LAYERS)


@BOTH
async def test_what_no_message_holds_comes_in_pieces(connect: Connect) -> None:
    drafter = FeatureDrafter()
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 100))
        await recorder.replies.get()
        link.features(FeatureChunk(session_id="s0", features=large(100)))
        link.step(report(0, (1,) * 140, 40, large(40, 100)))
        last = await recorder.replies.get()
        assert isinstance(last, Draft) and last.base_length == 140
        (rows,) = drafter.rows.values()
        assert rows == {position: bytes([position]) * (48 << 10) for position in range(140)}
    if connect is over_grpc:
        assert max(len(each.data) for each in drafter.arrived) <= limits.MAX_FEATURE_BYTES


@BOTH
async def test_a_drafter_that_does_not_keep_up_costs_hidden_states_and_nothing_else(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallQueue, "most_feature_bytes", 2 << 20)
    drafter = FeatureDrafter()
    drafter.held = asyncio.Event()
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 100))
        await recorder.replies.get()
        # It hangs in the middle of something that everything else waits for.
        link.forget(ForgetTenant(tenant="somebody", forget_id=1))
        await asyncio.sleep(0.05)
        one = large(20)
        for index in range(100):
            link.features(FeatureChunk(session_id="s0", features=Features(**fields(one) | {"start": 20 * index})))
            await asyncio.sleep(0)
        link.step(report(0, (1,) * 101, 1, None))
        assert link.connected
        drafter.held.set()
        assert (await recorder.replies.get()).forget_id == 1  # type: ignore[union-attr]
        assert (await recorder.replies.get()).base_length == 101  # type: ignore[union-attr]
    arrived = [features.start for features in drafter.arrived]
    # What had left before is there, and of the rest the newest.
    assert 1 < len(arrived) < 30
    assert arrived == sorted(arrived) and arrived[-1] == 1980


def fields(features: Features) -> dict[str, object]:
    return {name: getattr(features, name) for name in ("data", "rows", "width", "dtype", "start", "layers")}


def broken(features: Features, **wrong: object) -> Iterable[object]:
    yield FeatureChunk(session_id="s0", features=Features(**fields(features) | wrong))  # type: ignore[arg-type]


@BOTH
async def test_a_drafter_never_sees_hidden_states_that_break_a_limit(connect: Connect) -> None:
    """Nor does the conversation end for good: it begins anew."""
    drafter = FeatureDrafter()
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 12))
        await recorder.replies.get()
        recorder.connected.clear()
        for call in broken(states(0, 0, 4), rows=5):
            link.features(call)  # type: ignore[arg-type]
        await recorder.connected.wait()
        link.open(opening(0, (1,) * 12))
        await recorder.replies.get()
    assert drafter.arrived == []


class SlowStep(RandomDrafter):
    """Does not answer a step until it may, and notes for which of its sessions hidden states are."""

    def __init__(self) -> None:
        super().__init__(mood="good")
        self.may = asyncio.Event()
        self.opened = 0
        self.arrived: list[tuple[int, int]] = []

    @override
    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        self.opened += 1
        return await super().open(message)

    @override
    async def step(self, message: StepReport) -> Draft | DraftFailure:
        await self.may.wait()
        return await super().step(message)

    @override
    def features(self, message: FeatureChunk) -> None:
        self.arrived.append((self.opened, message.features.start))


@BOTH
async def test_hidden_states_behind_a_call_that_opens_a_session_anew_are_the_new_ones(connect: Connect) -> None:
    drafter = SlowStep()
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 4))
        link.features(FeatureChunk(session_id="s0", features=states(0, 0, 2)))
        await recorder.replies.get()
        link.step(report(0, (1,) * 5, 1, None))
        link.features(FeatureChunk(session_id="s0", features=states(0, 2, 4)))
        await until(lambda: drafter.arrived == [(1, 0), (1, 2)])
        link.open(opening(0, (1,) * 7))
        link.features(FeatureChunk(session_id="s0", features=states(0, 4, 6)))
        # Another session's come at once.
        link.open(opening(1, (1,) * 4))
        link.features(FeatureChunk(session_id="s1", features=states(1, 9, 10)))
        await until(lambda: len(drafter.arrived) == 3)
        assert drafter.arrived[2:] == [(2, 9)]
        drafter.may.set()
        await until(lambda: len(drafter.arrived) == 4)
        assert drafter.arrived[3:] == [(3, 4)]


@BOTH
async def test_of_hidden_states_that_wait_for_long_the_newest_are_kept(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.links.draft_server._MOST_HELD", 3 * len(states(0, 0, 1).data))
    drafter = SlowStep()
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening(0, (1,) * 4))
        await recorder.replies.get()
        link.step(report(0, (1,) * 5, 1, None))
        link.open(opening(0, (1,) * 9))
        for position in range(9):
            link.features(FeatureChunk(session_id="s0", features=states(0, position, position + 1)))
        link.open(opening(1, (1,) * 4))
        await recorder.replies.get()
        drafter.may.set()
        await until(lambda: len(drafter.arrived) == 3)
        assert drafter.arrived == [(3, 6), (3, 7), (3, 8)]
