"""The compiled blend drafts and learns what the Python form does, number for number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.drafter.config import DrafterConfig, RecyclingConfig, SuffixConfig
from services.drafter.merging import calibrators
from services.drafter.merging.blend import BlendSession
from services.drafter.native import automaton, recycling_table
from services.drafter.native.blend import CompiledBlendSession
from services.drafter.native.calibrator import KINDS, CompiledCalibrator
from services.drafter.native.library import drafting_library
from services.drafter.native.recycling_table import CompiledTable
from services.drafter.sessions import text_group
from services.drafter.sessions.text_group import TextGroup
from services.drafter.sources.recycling_table import RecyclingTable
from speculation.messages import OpenSession, StepReport
from speculation.tree import ROOT, chain, children
from speculation.types import Observation, TokenTree

_Result = TypeVar("_Result")

BLEND = ("suffix", "recycling")
CONFIG = DrafterConfig(suffix=SuffixConfig(max_cached_tokens=300), recycling=RecyclingConfig(max_entries=400))


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if drafting_library() is None:
        pytest.skip("there is no C compiler")


@contextmanager
def without_compiled_code() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (automaton, recycling_table, text_group, calibrators):
            patch.setattr(module, "drafting_library", lambda: None)
        yield


class Pair:
    """The same session twice, by the reference and compiled. What both answer must be the same."""

    def __init__(self, groups: tuple[TextGroup, TextGroup], message: OpenSession) -> None:
        with without_compiled_code():
            self._reference = groups[0].open(message, message.sources).joined
        self._compiled = groups[1].open(message, message.sources).joined
        assert type(self._reference) is BlendSession
        assert isinstance(self._compiled, CompiledBlendSession)

    def both(self, ask: Callable[[BlendSession], _Result]) -> _Result:
        assert isinstance(self._reference, BlendSession) and isinstance(self._compiled, BlendSession)
        with without_compiled_code():
            wanted = ask(self._reference)
        assert ask(self._compiled) == wanted
        return wanted


def outcome(draw: Random, tree: TokenTree, kinds: int, shown: bool) -> StepReport:
    """A path down the tree, mostly, then a token of any kind."""
    path: list[int] = []
    while (below := children(tree).get(path[-1] if path else ROOT)) and draw.random() < 0.8:
        path.append(draw.choice(below))
    ids = tuple(tuple(draw.sample(range(kinds + 9), draw.choice((0, 3, 8, 9)))) for _ in range(len(tree) + 1))
    return StepReport(
        session_id="s",
        committed=(*(tree.tokens[node] for node in path), draw.randrange(kinds)),
        length=0,
        prefix_hash=0,
        accepted_path=tuple(path),
        max_nodes=8,
        min_probability=draw.choice((0.0, 0.01)),
        observation=Observation(tree=tree, top_ids=ids) if shown else None,
    )


def told(blend: BlendSession, name: str, behind: Sequence[int]) -> list[list[tuple[int, str]]]:
    """What a source says at the text's end and after further tokens, to blends with other sources."""
    source = blend._sources[name]
    places = [source.start(), *(source.follow(source.start(), each) for each in behind)]
    return [[*source.candidates(place)] for place in places if place is not None]


def prompt(draw: Random, kinds: int) -> tuple[int, ...]:
    text = tuple(draw.randrange(kinds) for _ in range(draw.choice((0, 1, 2, 3, 40, 300))))
    return text + text[: draw.randrange(len(text) + 1)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 5, 30, 3000]), st.sampled_from([BLEND, BLEND[:1], BLEND[1:]]))
@pytest.mark.exhaustive
def test_trees_and_weights_are_the_references(seed: int, kinds: int, names: tuple[str, ...]) -> None:
    draw = Random(seed)
    groups = TextGroup(CONFIG), TextGroup(CONFIG)
    for _ in range(3):
        text = prompt(draw, kinds)
        message = OpenSession(
            session_id="s", tokens=text, prompt_length=len(text), sources=names, max_nodes=8, tenant=draw.choice(("t", None))
        )
        pair = Pair(groups, message)
        for _ in range(25):
            nodes = draw.choice((0, 1, 4, 16, 60))
            tree = pair.both(methodcaller("draft", nodes))
            if draw.random() < 0.3:
                assumed = tuple(draw.randrange(kinds) for _ in range(draw.randrange(1, 4)))
                pair.both(methodcaller("draft_after", assumed, 5))
            for node in range(-1, len(tree)):
                pair.both(methodcaller("likeliest_after", node))
            for name in names:
                pair.both(partial(told, name=name, behind=tree.tokens[:1]))
            report = outcome(draw, tree, kinds, draw.random() < 0.8)
            pair.both(methodcaller("observe", report))
            pair.both(methodcaller("catch_up"))
        pair.both(methodcaller("close"))
    (reference,), (compiled,) = (group._calibrators._own.values() for group in groups)
    assert isinstance(compiled, CompiledCalibrator)
    assert dict(compiled._squares) == dict(reference._squares)
    assert {kind: compiled._weights[kind] for kind in compiled._squares} == {
        kind: reference._weights[kind] for kind in reference._squares
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 40))
def test_a_table_holds_and_drops_what_the_reference_does(seed: int, most: int) -> None:
    draw, library = Random(seed), drafting_library()
    assert library is not None
    reference, compiled = RecyclingTable(most), CompiledTable(library, most)
    text = [draw.randrange(4) for _ in range(draw.randrange(4))]
    ends = reference.begin(text), compiled.begin(text)
    for _ in range(60):
        nodes = draw.randrange(6)
        tree = TokenTree(
            tokens=tuple(draw.randrange(4) for _ in range(nodes)),
            parents=tuple(draw.randrange(-1, node) for node in range(nodes)),
            sources=("x",) * nodes,
        )
        ids = tuple(tuple(draw.randrange(9) for _ in range(draw.randrange(9))) for _ in range(nodes + 1))
        path = [node for node in range(nodes) if draw.random() < 0.5]
        report = step([draw.randrange(9) for _ in range(draw.randrange(4))], path, tree, ids)
        reference.observe(ends[0], report)
        compiled.observe(ends[1], report)
        assert ends[0].context == ends[1].context
        # No more of them has a kind.
        assert [each[:6] for each in ends[0].passed] == [*ends[1].passed][: len(ends[0].passed)]
        for _ in range(20):
            key = tuple(draw.randrange(4) for _ in range(draw.randrange(1, 4)))
            assert compiled.top(key) == reference.top(key)
            assert compiled.seen(key) == reference.seen(key)


def step(committed: Sequence[int], path: Sequence[int], tree: TokenTree, ids: tuple[tuple[int, ...], ...]) -> StepReport:
    return StepReport(
        session_id="s",
        committed=tuple(committed),
        length=0,
        prefix_hash=0,
        accepted_path=tuple(path),
        max_nodes=4,
        observation=Observation(tree=tree, top_ids=ids),
    )


def test_ids_and_paths_that_do_not_fit_a_tree_are_refused() -> None:
    library = drafting_library()
    assert library is not None
    table, tree = CompiledTable(library, 9), chain([5, 6], "x")
    end = table.begin((1,))
    with pytest.raises(ValueError, match="ids after 2 nodes"):
        table.observe(end, step((5,), (), tree, ((1,), (2,))))
    for beyond in (2, -1):
        with pytest.raises(ValueError, match="accepted path"):
            table.observe(end, step((5, 6), (beyond,), tree, ((1,), (2,), (3,))))
    assert (end.context, table.top((1,))) == ((1,), ())


def test_what_was_learnt_is_saved_by_name_for_either_form(tmp_path: Path) -> None:
    config = DrafterConfig(calibration=tmp_path / "c", suffix=CONFIG.suffix)
    text = (1, 2, 3) * 20
    message = OpenSession(session_id="s", tokens=text, prompt_length=60, sources=BLEND, max_nodes=4)
    first = TextGroup(config)
    session = first.open(message, BLEND)
    for token in text:
        session.draft(4)
        session.observe(
            StepReport(session_id="s", committed=(token,), length=0, prefix_hash=0, accepted_path=(), max_nodes=4)
        )
    first.save()
    drafts = [session.draft(4)]
    with without_compiled_code():
        drafts.append(TextGroup(config).open(message, BLEND).draft(4))
    drafts.append(TextGroup(config).open(message, BLEND).draft(4))
    assert drafts[1] == drafts[2]
    assert drafts[1].scores == pytest.approx(drafts[0].scores, abs=1e-3)
    assert drafts[0].scores[0] > 0.9


def test_other_blends_are_the_references() -> None:
    message = OpenSession(session_id="s", tokens=(1,), prompt_length=1, sources=(), max_nodes=4)
    for names in (("recycling", "suffix"), ("suffix", "prompt_lookup"), ("prediction", *BLEND)):
        assert type(TextGroup(CONFIG).open(message, names).joined) is BlendSession
    assert len(set(KINDS)) == len(KINDS)
