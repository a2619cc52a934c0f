"""What compiled code drafts for all sessions of a step at once is what the Python form drafts for one after the other."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from benchmarks.papers.engine import ChangingDrafter
from outrider.internal.v1 import drafting_pb2
from services.drafter.config import DrafterConfig, RecyclingConfig, SuffixConfig
from services.drafter.native import automaton, recycling_table, steps
from services.drafter.native.library import drafting_library
from services.drafter.service import DrafterService
from services.drafter.sessions import text_group
from services.links.codec.columns import read_report_columns, write_reports
from services.metrics.observed_drafter import ObservedDrafter
from services.metrics.prometheus_sink import PrometheusSink
from speculation.columns import ReportColumns, SentReports
from speculation.messages import CloseSession, Draft, DraftFailure, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import ROOT, children
from speculation.types import EMPTY_TREE, Observation, TokenTree

BLENDS = [("suffix", "recycling"), ("suffix",), ("recycling",)]
# No compiled code knows the first one, so its reports are left.
SOURCES = [("prompt_lookup",), *BLENDS, BLENDS[0], BLENDS[0]]
# Small, so that texts and answers are forgotten, and answers beside each other told.
CONFIG = DrafterConfig(
    suffix=SuffixConfig(max_cached_tokens=200, max_tokens=150, depth=8), recycling=RecyclingConfig(max_entries=300)
)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if drafting_library() is None:
        pytest.skip("there is no C compiler")


@contextmanager
def python_form() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (automaton, recycling_table, text_group):
            patch.setattr(module, "drafting_library", lambda: None)
        yield


@dataclass
class Told:
    """A session as its verifier sees it."""

    name: str
    tokens: list[int]
    tree: TokenTree = EMPTY_TREE
    left: set[str] = field(default_factory=set)


def columns_of(reports: Sequence[StepReport]) -> ReportColumns:
    wire = drafting_pb2.StepReports()
    write_reports(SentReports.of(reports), wire)
    columns = read_report_columns(wire)
    assert columns is not None
    return columns


def report_of(draw: Random, told: Told, kinds: int) -> StepReport:
    """A step down the session's tree, mostly, then a token of any kind."""
    tree, path = told.tree, list[int]()
    while (below := children(tree).get(path[-1] if path else ROOT)) and draw.random() < 0.8:
        path.append(draw.choice(below))
    committed = (*(tree.tokens[node] for node in path), draw.randrange(kinds))
    told.tokens += committed
    top = draw.choice((0, 3, 8, 9))
    ids = tuple(tuple(draw.sample(range(kinds + 9), top)) for _ in range(len(tree) + 1))
    return StepReport(
        session_id=told.name,
        committed=committed,
        length=len(told.tokens),
        prefix_hash=extend_hash(EMPTY_HASH, told.tokens),
        accepted_path=tuple(path),
        max_nodes=draw.choice((0, 1, 4, 4, 16)),
        min_probability=draw.choice((0.0, 0.01)),
        observation=Observation(tree=tree, top_ids=ids) if top else None,
    )


class Pair:
    """The same drafter twice: one drafts together, the other, in Python alone, for each session by itself."""

    def __init__(self, config: DrafterConfig = CONFIG) -> None:
        self.together, self.reference = DrafterService(config), DrafterService(config)
        self.drafted = 0

    async def open(self, message: OpenSession) -> Draft:
        # Half a tree's scores would differ if one of the two had passed them through float32.
        made = await self.together.open(message)
        with python_form():
            assert await self.reference.open(message) == made
        for each in (self.together, self.reference):
            async for _ in each.further(message.session_id):
                raise AssertionError("nothing else drafts")
        assert isinstance(made, Draft)
        return made

    def quick(self) -> None:
        """Let no session have taken longer for its last step than who drafts at once may, as it does on a busy machine."""
        for session in self.together._sessions.values():
            session.text_s = 0.0 if session.text_s < math.inf else math.inf

    async def step(self, reports: Sequence[StepReport]) -> list[Draft | DraftFailure | None]:
        self.quick()
        columns = columns_of(reports)
        made = self.together.together(columns)
        drafts: dict[int, Draft | DraftFailure | None] = {}
        left: Sequence[int] = range(len(reports))
        if made is not None:
            left = made.left
            drafts |= zip([at for at in range(len(reports)) if at not in left], made.alone(), strict=True)
        self.drafted += len(drafts)
        alone = columns.alone()
        for at in left:
            drafts[at] = await self.together.step(alone[at])
        wanted: dict[int, Draft | DraftFailure | None] = {}
        with python_form():
            # Sessions share what they learn, so their order counts.
            for at in sorted(range(len(reports)), key=lambda each: (each in left, each)):
                wanted[at] = await self.reference.step(alone[at])
        assert drafts == wanted
        return [wanted[at] for at in range(len(reports))]


async def _steps(seed: int) -> int:
    draw, pair = Random(seed), Pair()
    kinds = draw.choice((3, 30, 3000))
    sessions: list[Told] = []
    for turn in range(60):
        if len(sessions) < 12 and (turn < 6 or draw.random() < 0.3):
            text = tuple(draw.randrange(kinds) for _ in range(draw.choice((1, 2, 40, 140))))
            tenant, group = draw.choice(("t", "u", None)), draw.choice(("", "", "g"))
            told = Told(f"s{turn}", list(text))
            told.tree = (
                await pair.open(
                    OpenSession(
                        session_id=told.name,
                        tokens=text,
                        prompt_length=len(text),
                        sources=draw.choice(SOURCES),
                        max_nodes=4,
                        tenant=tenant,
                        group=group,
                        temperature=draw.choice((0.0, 1.0)),
                    )
                )
            ).tree
            sessions.append(told)
        some = [told for told in sessions if draw.random() < 0.8]
        for told, draft in zip(some, await pair.step([report_of(draw, told, kinds) for told in some]), strict=True):
            assert isinstance(draft, Draft)
            told.tree = draft.tree
        if draw.random() < 0.15 and sessions:
            gone = sessions.pop(draw.randrange(len(sessions)))
            pair.together.close(CloseSession(session_id=gone.name))
            with python_form():
                pair.reference.close(CloseSession(session_id=gone.name))
    return pair.drafted


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.examples(4)
def test_random_batches_get_the_references_drafts(seed: int) -> None:
    assert asyncio.run(_steps(seed)) > 50


async def _opened(names: str) -> tuple[Pair, dict[str, Told]]:
    pair, text = Pair(), (1, 2, 3, 1, 2, 3, 1)
    told = {name: Told(name, list(text)) for name in names}
    for name in names:
        message = OpenSession(session_id=name, tokens=text, prompt_length=7, sources=BLENDS[0], max_nodes=4)
        told[name].tree = (await pair.open(message)).tree
        # How long a session's step takes is known from its first one on, so that is not taken together.
        (draft,) = await pair.step([replace(report_of(Random(3), told[name], 4), max_nodes=4)])
        assert isinstance(draft, Draft) and len(draft.tree)
        told[name].tree = draft.tree
    assert not pair.drafted
    return pair, told


async def test_a_report_that_does_not_fit_is_left_and_its_session_untouched() -> None:
    pair, told = await _opened("abc")
    reports = [report_of(Random(5), each, 4) for each in told.values()]
    reports[0] = replace(reports[0], prefix_hash=1)
    reports[1] = replace(reports[1], accepted_path=(77,), observation=Observation(tree=EMPTY_TREE, top_ids=((1, 2),)))
    columns = columns_of([*reports, replace(reports[2], session_id="nobody")])
    made = pair.together.together(columns)
    assert made is not None and list(made.left) == [0, 1, 3] and made.session_ids == ["c"]
    missed = pair.together.at_once(columns.alone()[0])
    assert isinstance(missed, DraftFailure) and missed.reopen
    # Its recycling is lost, as it always was, and nothing else.
    assert isinstance(pair.together.at_once(columns.alone()[1]), Draft)


async def test_two_reports_of_one_session_are_taken_in_their_order() -> None:
    pair, told = await _opened("a")
    first = report_of(Random(1), told["a"], 4)
    second = report_of(Random(2), replace(told["a"], tree=EMPTY_TREE), 4)
    drafts = await pair.step([first, second])
    assert [draft.base_length for draft in drafts if isinstance(draft, Draft)] == [first.length, second.length]
    assert pair.drafted == 2


async def test_sessions_that_are_asked_alone_in_between_have_missed_nothing() -> None:
    pair, told = await _opened("ab")
    draw = Random(9)
    for turn in range(9):
        reports = [report_of(draw, each, 4) for each in told.values()]
        if turn % 3 < 2:
            drafts = await pair.step(reports)
        else:
            pair.quick()
            drafts = [pair.together.at_once(report) for report in reports]
            with python_form():
                assert drafts == [await pair.reference.step(report) for report in reports]
        for each, draft in zip(told.values(), drafts, strict=True):
            assert isinstance(draft, Draft)
            each.tree = draft.tree
    assert pair.drafted == 12


async def test_sessions_of_a_slow_step_draft_alone_next() -> None:
    pair, told = await _opened("ab")
    draw, drafter = Random(7), pair.together

    def stepped() -> ReportColumns:
        return columns_of([replace(report_of(draw, each, 4), max_nodes=4) for each in told.values()])

    def note(drafts: Sequence[object]) -> None:
        for each, draft in zip(told.values(), drafts, strict=True):
            assert isinstance(draft, Draft)
            each.tree = draft.tree

    # Five seconds a session, where half a second is allowed.
    slow = drafter._together.drafted(drafter._sessions, stepped(), 0.5, time.perf_counter() - 10)
    assert slow is not None
    note(slow.alone())
    assert all(session.text_s > 0.5 for session in drafter._sessions.values())
    alone = stepped()
    assert drafter.together(alone) is None
    # They tell how long they take, and go together again.
    note([await drafter.step(report) for report in alone.alone()])
    made = drafter.together(stepped())
    assert made is not None and len(made) == 2


async def test_without_compiled_code_nothing_is_done() -> None:
    pair, told = await _opened("a")
    columns = columns_of([report_of(Random(1), told["a"], 4)])
    assert pair.reference.together(columns) is None
    assert isinstance(pair.reference.at_once(columns.alone()[0]), Draft)


async def test_sessions_with_further_drafts_are_left() -> None:
    pair, told = await _opened("a")
    pair.together._config = replace(CONFIG, draft_ahead=2)
    assert pair.together.together(columns_of([report_of(Random(1), told["a"], 4)])) is None


async def test_what_stands_in_front_of_a_drafter_counts_drafts_made_together_as_others() -> None:
    pair, told = await _opened("abc")
    reports = [replace(report_of(Random(5), each, 4), max_nodes=4) for each in told.values()]
    together, alone = PrometheusSink(), PrometheusSink()
    made = ObservedDrafter(ChangingDrafter(pair.together), together).together(columns_of(reports))
    assert made is not None and len(made) == 3
    for report in reports:
        assert await ObservedDrafter(pair.reference, alone).step(report) is not None
    for name in ("drafter_drafts", "drafter_nodes", "drafter_draft_seconds_count"):
        counted = [_lines(sink, name) for sink in (together, alone)]
        assert counted[0] == counted[1] and counted[0], name


def _lines(sink: PrometheusSink, name: str) -> list[str]:
    lines = sink.exposition().decode().splitlines()
    return [line for line in lines if line.startswith(f"outrider_{name}") and "_created" not in line]


def test_other_threads_run_while_many_sessions_are_drafted_for() -> None:
    library = drafting_library()
    assert library is not None
    # ctypes' flag of functions that keep the interpreter's lock.
    keeps = {name: bool(getattr(library, name)._flags_ & 4) for name in ("steps_take", "steps_take_unlocked")}
    assert keeps == {"steps_take": True, "steps_take_unlocked": False}
    assert [steps._taking(count) is library.steps_take for count in (1, 7, 8, 64)] == [True, True, False, False]
