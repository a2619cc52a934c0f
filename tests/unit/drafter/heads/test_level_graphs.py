"""A head's passes over levels of trees, captured in fixed buffers: the guesses are those of launched passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.level_attention import LaneRows, Lanes
from services.drafter.heads.level_graphs import LevelGraphs, LevelSizes
from services.drafter.sources.interfaces import AheadWanted, DraftWanted
from speculation.errors import ConfigurationError
from speculation.types import TokenTree
from tests.drafters.feature_sources import EAGLE, EAGLE3, HEADS, head, known, opening, report, same, source, text
from tests.kernels.recorded_graphs import RecordedGraph, recorded
from tests.running.refusals import refuses

FORM = TreeForm(steps=3, width=4)
LENGTHS = (9, 3, 14, 30, 6)


class Graphs:
    """Makes ``LevelGraphs``, and keeps those and what was captured."""

    def __init__(self, capture: Callable[[Callable[[], Any]], Any] = recorded, **given: Any) -> None:
        self.made: list[LevelGraphs] = []
        self.graphs: list[RecordedGraph] = []
        self._capture, self._given = capture, {"fewest": 8, "most_rows": 16, **given}

    def __call__(self, *args: Any) -> LevelGraphs:
        self.made.append(LevelGraphs(*args, capture=self._captured, **self._given))
        return self.made[-1]

    @property
    def replays(self) -> int:
        """How often graphs were replayed after their trials."""
        return sum(graph.replays - 1 for graph in self.graphs)

    def _captured(self, run: Callable[[], Any]) -> Any:
        found = self._capture(run)
        self.graphs.append(found[0])
        return found


def drafts(
    own: FeatureSource, lengths: tuple[int, ...], config: HeadConfig, *, rounds: int = 3, **more: Any
) -> list[TokenTree]:
    """Of several sessions at once, over some steps, each of which commits one to three tokens."""
    sessions = [own.open(opening(text(length, seed), prompt_length=1, **more)) for seed, length in enumerate(lengths)]
    held = [known(range(length - 1), config=config, seed=seed) for seed, length in enumerate(lengths)]
    found: list[TokenTree] = []
    for step in range(rounds):
        wanted = [
            DraftWanted(session=each, max_nodes=10, states=states) for each, states in zip(sessions, held, strict=True)
        ]
        found += own.draft(wanted)
        if own._ahead:
            asked = [AheadWanted(session=each, max_nodes=5, min_probability=0.0, most=2) for each in sessions]
            found += [ahead.tree for some in own.draft_ahead(asked, lambda: True) for ahead in some]
        for seed, (session, states) in enumerate(zip(sessions, held, strict=True)):
            more_text = text(1 + (step + seed) % 3, seed=100 + step)
            known_to = len(session.tokens) - 1
            report(session, more_text)
            for each in known(range(known_to, known_to + len(more_text)), config=config, seed=seed)._chunks:
                states.add(each)
    return found


def equal(captured: list[TokenTree], launched: list[TokenTree]) -> None:
    assert len(captured) == len(launched)
    for one, other in zip(captured, launched, strict=True):
        same(one, other)


@pytest.mark.parametrize("form", [FORM, TreeForm(steps=3, width=4, dynamic=12)], ids=["best", "eagle2"])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_captured_levels_draft_the_launched_ones_trees(config: HeadConfig, form: TreeForm) -> None:
    graphs = Graphs()
    for lengths in (LENGTHS[:4], LENGTHS[:1], LENGTHS[1:3]):
        graphs.graphs.clear()
        own = source(config, form=form, graphs=graphs, window=20)
        assert graphs.graphs, "captured at start"
        before = graphs.replays
        equal(drafts(own, lengths, config), drafts(source(config, form=form, window=20), lengths, config))
        assert graphs.replays > before


def test_drafts_ahead_go_on_behind_captured_levels() -> None:
    graphs = Graphs()
    own = source(EAGLE3, form=FORM, graphs=graphs, ahead=True)
    equal(
        drafts(own, LENGTHS[:3], EAGLE3, rounds=2),
        drafts(source(EAGLE3, form=FORM, ahead=True), LENGTHS[:3], EAGLE3, rounds=2),
    )
    assert graphs.replays


def test_tokens_of_the_prompt_are_drafted_beside_what_the_graph_scores() -> None:
    graphs, ids = Graphs(), range(0, 60, 3)
    few = [*ids]
    found = drafts(source(EAGLE, ids=few, form=FORM, graphs=graphs), LENGTHS[:2], EAGLE)
    equal(found, drafts(source(EAGLE, ids=few, form=FORM), LENGTHS[:2], EAGLE))
    assert graphs.replays


def test_chains_that_are_drawn_are_drawn_from_the_same() -> None:
    def chains(**given: Any) -> list[TokenTree]:
        rng = np.random.default_rng(4)
        own = source(
            EAGLE, form=FORM, draw=lambda weights: int(rng.choice(len(weights), p=weights / weights.sum())), **given
        )
        return drafts(own, LENGTHS[:2], EAGLE, sampled=True, temperature=0.8)

    graphs = Graphs()
    equal(chains(graphs=graphs), chains())
    assert graphs.replays


def test_what_no_graph_holds_is_launched() -> None:
    graphs = Graphs()
    own = source(EAGLE, form=FORM, graphs=graphs)
    equal(drafts(own, LENGTHS, EAGLE), drafts(source(EAGLE, form=FORM), LENGTHS, EAGLE))
    assert not graphs.replays, "there are lanes for four sessions"


def test_lanes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.drafter.heads.level_graphs._MOST_BYTES", 40_000)
    graphs = Graphs()
    own = source(EAGLE, form=FORM, graphs=graphs)
    assert 0 < len(graphs.graphs) < 20
    long = drafts(own, (900,), EAGLE, rounds=1)
    assert not graphs.replays
    equal(long, drafts(source(EAGLE, form=FORM), (900,), EAGLE, rounds=1))


@pytest.mark.parametrize("planted", ["lane", "numbers", "seen", "states"])
def test_a_buffer_that_is_stale_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare does depend on each buffer."""
    own = source(EAGLE, form=FORM, graphs=Graphs())
    if planted == "lane":
        monkeypatch.setattr(Lanes, "fill", lambda *_: None)
    elif planted == "states":
        keep = FeatureSource._replayed
        monkeypatch.setattr(
            FeatureSource, "_replayed",
            lambda self, passes, lanes, level, tokens, states, positions: keep(
                self, passes, lanes, level, tokens, torch.zeros_like(states), positions
            ),
        )  # fmt: skip
    else:
        lay_out = LaneRows.lay_out

        def stale(self: LaneRows, *given: Any) -> torch.Tensor:
            held = getattr(self, f"_{planted}")
            before = held.clone()
            at = lay_out(self, *given)
            held.copy_(before)
            return at

        monkeypatch.setattr(LaneRows, "lay_out", stale)
    with pytest.raises(AssertionError):
        equal(drafts(own, LENGTHS[:3], EAGLE), drafts(source(EAGLE, form=FORM), LENGTHS[:3], EAGLE))


def test_a_capture_of_another_width_fails() -> None:
    def narrow(name: str, own: Any, shape: CacheShape, sizes: LevelSizes) -> LevelGraphs:
        return Graphs()(name, own, shape, LevelSizes(width=2, rows=sizes.rows))

    own = source(EAGLE, form=FORM, graphs=narrow)
    with pytest.raises(ValueError, match="broadcast"):
        drafts(own, LENGTHS[:2], EAGLE)


def frozen(run: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
    """A graph that reads what its buffers held when it was captured."""
    graph, made = recorded(run)
    graph._calls.clear()
    return graph, made


def test_a_graph_that_replays_something_else_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs(frozen)
    own = source(EAGLE, form=FORM, graphs=graphs)
    assert "head that drafts as eagle cannot be captured, so each takes longer" in caplog.text
    equal(drafts(own, LENGTHS[:2], EAGLE), drafts(source(EAGLE, form=FORM), LENGTHS[:2], EAGLE))
    assert len(graphs.graphs) == 1, "no other is tried"


def test_where_kernels_are_asked_for_by_name_a_capture_that_fails_is_refused() -> None:
    with refuses(ConfigurationError, "verifier.kernels", "triton", "a replay makes other numbers"):
        source(EAGLE, form=FORM, graphs=Graphs(frozen, required="triton"))


def test_too_little_memory_names_the_settings() -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with pytest.raises(ConfigurationError, match=r"lower drafter\.draft_window, drafter\.speculative_eagle_topk"):
        source(EAGLE, form=FORM, graphs=Graphs(full))


def test_a_head_whose_layers_ask_for_more_is_launched() -> None:
    graphs = Graphs(required="triton")
    own = head(EAGLE)
    forward = own.forward

    def asks(embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Any) -> Any:
        assert attend.depths is not None
        return forward(embeddings, states, positions, attend)

    own.forward = asks  # type: ignore[method-assign]
    made = FeatureSource("eagle", own, window=1000, form=FORM, graphs=partial(graphs))
    assert not graphs.graphs
    equal(drafts(made, LENGTHS[:2], EAGLE), drafts(source(EAGLE, form=FORM), LENGTHS[:2], EAGLE))


def test_nothing_is_captured_on_a_cpu() -> None:
    made = LevelGraphs("eagle", head(EAGLE), head(EAGLE).cache_shape(64), FORM.sizes)
    assert made.capture() == 0
