"""Drafts that share a message are taken as each would be alone: checked, rated, or dropped without harm to the others."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.internal.v1 import drafting_pb2
from services.links.codec import drafting as codec
from services.links.handing_over import hand_over
from services.verifier.comparing.side_sessions import Replies, _Sorting
from services.verifier.engine import drafting
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.native.library import engine_library
from services.verifier.engine.native.tree_check import MALFORMED, TreeCheck, named_sources
from services.verifier.engine.origins import Origin
from services.verifier.engine.stats import LoopStats
from speculation import limits
from speculation.columns import DraftColumns
from speculation.errors import MalformedTree
from speculation.messages import Draft, DraftingReply
from speculation.tree import validate
from speculation.types import Plan, TokenTree
from tests.engine.fakes import random_tree, request

VOCAB = 50
NAMES = ("recycling", "suffix", "of nobody")
SERVED = ("suffix", "recycling")


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "now", lambda: 1.0)


def tree_of(source: random.Random) -> TokenTree:
    """Mostly a sound one."""
    made = random_tree(source, 6, VOCAB)
    names = NAMES if source.random() < 0.1 else NAMES[:2]
    made = replace(made, sources=tuple(source.choice(names) for _ in made.sources))
    if not len(made):
        return made
    at, fault = source.randrange(len(made)), source.randrange(20)
    if fault == 0:
        return replace(made, tokens=(*made.tokens[:at], VOCAB, *made.tokens[at + 1 :]))
    if fault == 1:
        return replace(made, parents=(*made.parents[:at], source.choice((at, -2)), *made.parents[at + 1 :]))
    if fault == 2:
        return replace(made, scores=(*made.scores[:at], math.nan, *made.scores[at + 1 :]))
    return made


def columns_of(trees: Sequence[TokenTree], names: Sequence[str], base: Sequence[tuple[int, int]] = ()) -> DraftColumns:
    return DraftColumns(
        left=(),
        session_ids=list(names),
        base_lengths=[length for length, _ in base] or [3] * len(trees),
        base_hashes=[digest for _, digest in base] or [0] * len(trees),
        node_counts=[len(tree) for tree in trees],
        tokens=[token for tree in trees for token in tree.tokens],
        parents=[parent for tree in trees for parent in tree.parents],
        sources=[NAMES.index(name) for tree in trees for name in tree.sources],
        source_names=NAMES,
        scores=[score for tree in trees for score in tree.scores],
        drafting_s=0.25,
        group="text",
    )


def valid(tree: TokenTree, sources: Sequence[str] | None) -> bool:
    try:
        validate(tree, vocab_size=VOCAB, max_nodes=limits.MAX_TREE_NODES, sources=sources)
    except MalformedTree:
        return False
    return True


@pytest.mark.skipif(engine_library() is None, reason="there is no compiler")
@pytest.mark.parametrize("seed", range(30))
def test_the_compiled_check_refuses_what_the_reference_refuses(seed: int) -> None:
    source = random.Random(seed)
    trees = [tree_of(source) for _ in range(40)]
    drafts = columns_of(trees, [f"s{at}" for at in range(40)])
    named = named_sources(drafts, VOCAB)
    assert named is not None
    assert [each != MALFORMED for each in named] == [valid(tree, None) for tree in trees]
    assert [{NAMES[bit] for bit in range(3) if each >> bit & 1} for each in named if each != MALFORMED] == [
        set(tree.sources) for tree in trees if valid(tree, None)
    ]
    for served in (SERVED, ("suffix",), ()):
        check = TreeCheck(drafts, VOCAB, lambda _, served=served: served)  # type: ignore[misc]
        assert [check.sound(at, ("any",)) for at in range(40)] == [valid(tree, served) for tree in trees]


def test_trees_that_compiled_code_cannot_tell_of_are_checked_one_by_one() -> None:
    tree = TokenTree(tokens=(1 << 31,), parents=(-1,), sources=("suffix",), scores=(1.0,))
    assert not TreeCheck(columns_of([tree], ["s"]), VOCAB, lambda _: SERVED).sound(0, SERVED)
    many = columns_of([random_tree(random.Random(1), 3, VOCAB, "suffix")] * 2, ["s", "t"])
    named = TreeCheck(replace(many, sources=[63] * len(many.tokens), source_names=("x",) * 64), VOCAB, lambda _: SERVED)
    assert not named.sound(0, SERVED)


class _Requests:
    """Stands in for ``Admission``."""

    def __init__(self, live: Sequence[LiveRequest]) -> None:
        self.running = {each.id: each for each in live}

    def find(self, name: str) -> LiveRequest | None:
        return self.running.get(name)


class Engine:
    """What takes the drafts of eight requests, the last of which has no session at the origin."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.live = []
        for at in range(8):
            plan = Plan(strategy="test", sources=source.choice((SERVED, ("suffix",))), max_nodes=8)
            text = [source.randrange(VOCAB) for _ in range(5)]
            asked = request(f"s{at}", text, plan, max_tokens=100)
            self.live.append(
                LiveRequest(asked, frozenset(), vocab_size=VOCAB, max_model_len=500, max_nodes=8, by_paper=False)
            )
        self.stats = LoopStats()
        self.origin = Origin(name="one", link=_Link(), trusted=True)  # type: ignore[arg-type]
        requests, config = _Requests(self.live), LoopConfig(max_num_seqs=8, max_batched_tokens=64)
        self.drafting = Drafting(
            [self.origin],
            requests,
            config,
            self.stats,
            None,
            VOCAB,
            1,
            timed=False,  # type: ignore[arg-type]
        )
        self.drafting._now = lambda: 1.0
        for each in self.live[:7]:
            self.drafting.open(each, None)

    def found(self) -> list[object]:
        return [
            [(each.draft, each.late, each.asked) for each in box.find(live.tokens)] + [box.worth("text"), {**box._asked}]
            for live in self.live
            for box in live.mailboxes.values()
        ]


class _Link:
    """Implements ``DraftLink`` by doing nothing."""

    connected = True

    def __getattr__(self, _: str) -> object:
        return lambda *_: None


@pytest.mark.parametrize("seed", range(20))
def test_the_engine_takes_them_as_one_by_one(seed: int) -> None:
    together, alone = Engine(seed), Engine(seed)
    source = random.Random(seed)
    for _ in range(6):
        names = source.sample([f"s{at}" for at in range(9)], 8)
        base = [
            (len(live.tokens), live.prefixes.hash if source.random() < 0.9 else 7)
            for name in names
            for live in together.live[int(name[1:]) % 8 :][:1]
        ]
        drafts = columns_of([tree_of(source) for _ in names], names, base)
        together.drafting.on_drafts(together.origin, drafts)
        for draft in drafts.alone():
            alone.drafting.on_reply(alone.origin, draft)
        assert together.found() == alone.found()
        assert together.stats == alone.stats
        for at, (one, other) in enumerate(zip(together.live, alone.live, strict=True)):
            committed = tuple(source.randrange(VOCAB) for _ in range(source.randint(1, 3)))
            known = [found.tree.tokens[0] for box in one.mailboxes.values() for found in box.find(one.tokens) if found.tree]
            if known and at % 2:
                committed = (known[0], *committed)
            for each in (one, other):
                each.commit(committed)
                for box in each.mailboxes.values():
                    box.asked(len(each.tokens), 1.0)
        assert together.found() == alone.found()
    assert together.stats.drafts_malformed


def test_a_draft_that_cannot_be_taken_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(1)
    trees = [TokenTree(tokens=(1,), parents=(-1,), sources=("suffix",), scores=(1.0,))] * 3
    base = [(len(live.tokens), live.prefixes.hash) for live in engine.live[:3]]
    monkeypatch.setattr(engine.live[1].mailboxes["one"], "add", None)
    engine.drafting.on_drafts(engine.origin, columns_of(trees, ["s0", "s1", "s2"], base))
    assert [len(live.drafts()) for live in engine.live[:3]] == [1, 0, 1]
    assert "failed" in caplog.text


class _Receiver:
    """Implements ``DraftReceiver``."""

    def __init__(self) -> None:
        self.heard: list[DraftingReply | DraftColumns] = []

    def on_reply(self, reply: DraftingReply) -> None:
        self.heard.append(reply)

    def on_connected(self) -> None:
        raise AssertionError

    def on_drafts(self, drafts: DraftColumns) -> None:
        self.heard.append(drafts)


def message_of(drafts: Sequence[Draft]) -> drafting_pb2.DraftResponse:
    (wire,) = codec.encode_drafting_replies(drafts)
    return drafting_pb2.DraftResponse.FromString(wire.SerializeToString())


def drafts_of(count: int) -> list[Draft]:
    source = random.Random(count)
    trees = [replace(random_tree(source, 4, VOCAB, "suffix"), scores=()) for _ in range(count)]
    scored = [replace(tree, scores=tuple(source.randrange(9) / 8 for _ in tree.tokens)) for tree in trees]
    return columns_of(scored, [f"s{at}" for at in range(count)]).alone()


def test_a_receiver_hears_of_several_drafts_together() -> None:
    drafts, receiver = drafts_of(5), _Receiver()
    hand_over(message_of(drafts), receiver)
    (heard,) = receiver.heard
    assert isinstance(heard, DraftColumns) and heard.alone() == drafts
    hand_over(message_of(drafts[:1]), receiver)
    assert receiver.heard[1:] == drafts[:1]


@pytest.mark.parametrize(
    "changed",
    [
        {"group": "other"},
        {"drafting_s": 0.5},
        {"tree": TokenTree(tokens=(1,), parents=(-1,), sources=("suffix",))},
    ],
)
def test_drafts_that_have_no_room_in_columns_are_heard_one_by_one(changed: dict[str, object]) -> None:
    drafts, receiver = drafts_of(5), _Receiver()
    drafts[2] = replace(drafts[2], **changed)  # type: ignore[arg-type]
    hand_over(message_of(drafts), receiver)
    assert receiver.heard == drafts


def test_side_sessions_hear_of_their_own() -> None:
    drafts, receiver, side = drafts_of(4), _Receiver(), Replies()
    sorting = _Sorting(receiver, {})
    sorting.on_drafts(columns := columns_of([each.tree for each in drafts], [each.session_id for each in drafts]))
    assert receiver.heard == [columns]
    sorting = _Sorting(receiver, {"s1": side})
    sorting.on_drafts(columns)
    assert receiver.heard[1:] == [drafts[0], drafts[2], drafts[3]] and side.get_nowait() == drafts[1]
