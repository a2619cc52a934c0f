"""The papers' sources: ANPD's counts, Lookahead's window, SPECTRA's dictionaries, what retrieval found."""

from __future__ import annotations

import pytest

from services.drafter.config import AnpdConfig, LookaheadConfig, SpectraConfig
from services.drafter.sources.anpd import Anpd
from services.drafter.sources.lookahead import Lookahead, Pool
from services.drafter.sources.retrieval import Retrieval, hit_tree
from services.drafter.sources.spectra import CORE, FULL, RETRIEVED, RetrievingSpectraSession, Spectra, SpectraSession
from services.drafter.sources.window import Window
from speculation.messages import Continuation, OpenSession, StepReport
from speculation.tree import chain, path_to, prune, validate
from speculation.types import EMPTY_TREE, Observation, TokenTree


def opening(tokens: list[int]) -> OpenSession:
    return OpenSession(session_id="s", tokens=tuple(tokens), prompt_length=len(tokens), sources=(), max_nodes=8)


def report(*committed: int, observation: Observation | None = None) -> StepReport:
    return StepReport(
        session_id="s", committed=committed, length=0, prefix_hash=0, accepted_path=(), max_nodes=8, observation=observation
    )


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """Of nodes that may be accepted."""
    validate(tree, vocab_size=10**6, max_nodes=512)
    return [tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(len(tree)) if node not in tree.probes]


def computed(tree: TokenTree, say: dict[int, int]) -> Observation:
    """What a pass shows of a tree, where the model says ``say[token]`` after a token."""
    top = [(say.get(token, 0), 999) for token in tree.tokens]
    return Observation(tree=tree, top_ids=((0,), *top), probe_ids=tuple(top[node] for node in tree.probes))


def test_anpd_backs_off_from_the_longest_ending() -> None:
    session = Anpd(AnpdConfig()).open(opening([1, 2, 3, 9, 2, 4, 8, 2, 4, 1, 2]))
    # After 2 came 4 twice, but after 1, 2 it was 3.
    assert paths(session.draft(2)) == [(3,), (3, 9)]
    session.observe(report(5, 2))
    assert paths(session.draft(1)) == [(4,)]
    assert len(Anpd(AnpdConfig()).open(opening([1, 2, 3])).draft(4)) == 0


def window(**config: int) -> Window:
    return Window(**({"ngram": 3, "width": 2, "tokens": [5], "seed": 1} | config))  # type: ignore[arg-type]


def test_the_window_is_a_tree_of_probes() -> None:
    columns = window()
    first = columns.attach(EMPTY_TREE, "w", 8)
    validate(first, vocab_size=10, max_nodes=8)
    assert first.tokens == (5, 5)
    # The second column's first token sees the first column's.
    assert first.parents == (-1, 0)
    assert first.probes == (0, 1)
    assert columns.advance(report(1, observation=computed(first, {5: 6})), lambda likely: likely[0]) == []
    second = columns.attach(chain([1], "x", [0.5]), "w", 8)
    assert second.tokens == (1, 5, 6, 5, 6)
    # Each column's second token hangs on its first, and sees nothing of its neighbour's second.
    assert second.parents == (-1, -1, 1, 1, 3)
    assert second.probes == (1, 2, 3, 4)
    grams = columns.advance(report(1, observation=computed(second, {6: 7})), lambda likely: likely[0])
    assert grams == [(5, 6, 7)] * 2
    assert columns.attach(EMPTY_TREE, "w", 8).tokens == (6, 7, 6, 7)


def test_a_window_gets_by_with_few_rows_or_none() -> None:
    columns = window(width=4)
    assert len(columns.attach(EMPTY_TREE, "w", 3)) == 3
    assert len(columns.attach(EMPTY_TREE, "w", 0)) == 0
    part = columns.attach(EMPTY_TREE, "w", 2)
    columns.advance(report(1, observation=computed(part, {5: 6})), lambda likely: likely[0])
    # Two columns have got longer, the others wait.
    assert columns.attach(EMPTY_TREE, "w", 9).tokens == (5, 6, 5, 6, 5, 5)


def test_lookahead_proposes_what_the_window_found() -> None:
    session = Lookahead(LookaheadConfig(ngram=3, window=2, guesses=2)).open(opening([5]))
    for say in ({5: 6}, {6: 7}):
        tree = session.draft(20)
        assert paths(tree) == []
        session.observe(report(1, observation=computed(tree, say)))
    session.observe(report(5))
    assert (6, 7) in paths(session.draft(20))
    assert (1, 1) in paths(session.draft(20))


def test_lookahead_begins_with_the_prompts_n_grams() -> None:
    session = Lookahead(LookaheadConfig(ngram=3, window=0)).open(opening([1, 2, 3, 4, 1]))
    assert paths(session.draft(8)) == [(2,), (2, 3)]


def test_a_pool_keeps_the_latest() -> None:
    pool = Pool(2)
    for token, seen in ((1, "text"), (2, "text"), (3, "text"), (2, "window")):
        pool.add(0, (token,), seen)
    assert pool.after(0) == [((2,), "window"), ((3,), "text")]
    assert pool.after(1) == []


def spectra(tokens: list[int], **config: object) -> SpectraSession:
    return Spectra(SpectraConfig(**({"ngram": 3, "window": 0} | config)), name=CORE).open(opening(tokens))  # type: ignore[arg-type]


def test_spectra_looks_forward_and_backward() -> None:
    text = [1, 2, 3, 4, 5, 1]
    assert (2, 3) in paths(spectra(text, backward=False).draft(8))
    assert paths(spectra(text, forward=False).draft(8)) == [(2,), (2, 3)]
    assert paths(spectra(text, forward=False, backward=False).draft(8)) == []


def test_a_backward_chain_ends_where_nothing_is_known() -> None:
    # N - 1 = 4 look-ups, but after 9 nothing was seen: the chain ends there.
    session = spectra([1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 5, 6, 7, 8, 3], ngram=5, forward=False)
    assert paths(session.draft(8))[-1] == (4, 9, 5, 6)
    assert paths(spectra([1, 2, 3, 4, 8, 7, 4], ngram=3, forward=False).draft(8)) == [(8,), (8, 7)]


def test_sub_n_grams_are_entered() -> None:
    # 2 stands in the middle of an n-gram, never at the beginning of a whole one.
    assert paths(spectra([1, 2, 3, 2], ngram=3, backward=False, sub_ngrams=True).draft(8))
    assert not paths(spectra([1, 2, 3], ngram=3, backward=False, sub_ngrams=False).draft(8))


@pytest.mark.parametrize(("explore", "expected"), [(0.0, 6), (1.0, 999)])
def test_exploring_takes_what_is_not_known_yet(explore: float, expected: int) -> None:
    session = spectra([5, 6, 8, 5], window=1, explore_prob=explore)
    probes = session._window.attach(EMPTY_TREE, CORE, 1)
    session.observe(report(1, observation=computed(probes, dict.fromkeys((5, 6, 8), 6))))
    assert session._window.attach(EMPTY_TREE, CORE, 2).tokens[1] == expected


def test_full_spectra_takes_what_retrieval_found() -> None:
    session = Spectra(SpectraConfig(window=0), name=FULL).open(opening([1, 2, 3]))
    assert isinstance(session, RetrievingSpectraSession)
    assert session.query().suffix == (1, 2, 3)
    session.found([Continuation(tokens=(7, 8), count=1, match_length=2)])
    assert (7, 8) in paths(session.draft(8))
    session.observe(report(4))
    assert session.query().suffix == (1, 2, 3, 4)


def test_hits_take_the_places_that_are_left() -> None:
    session = Spectra(SpectraConfig(ngram=3, window=0, guesses=3), name=FULL).open(opening([1, 2, 3, 1, 4, 5, 1]))
    own = session._guesses()
    assert len(own) == 3
    session.found([Continuation(tokens=(70 + n,), count=1, match_length=2) for n in range(64)])  # type: ignore[attr-defined]
    assert session._guesses() == [*own[:2], ((70,), RETRIEVED)]


def test_columns_that_were_cut_by_depth_wait() -> None:
    columns = window(ngram=4, width=2)
    for say in ({5: 6}, {6: 7}):
        columns.advance(report(1, observation=computed(columns.attach(EMPTY_TREE, "w", 9), say)), lambda likely: likely[0])
    whole = columns.attach(EMPTY_TREE, "w", 9)
    assert whole.tokens == (5, 6, 7, 5, 6, 7)
    cut = prune(whole, 9, 3)
    assert cut.tokens == (5, 6, 7, 5, 6)
    assert columns.advance(report(1, observation=computed(cut, {7: 8})), lambda likely: likely[0]) == [(5, 6, 7, 8)]
    assert columns.attach(EMPTY_TREE, "w", 9).tokens == (6, 7, 8, 5, 6, 7)


def test_hits_become_a_prefix_tree() -> None:
    hits = [Continuation(tokens=(1, 2), count=3, match_length=4), Continuation(tokens=(1, 3), count=1, match_length=4)]
    tree = hit_tree(hits, "r")
    assert paths(tree) == [(1,), (1, 2), (1, 3)]
    # All four matches of four tokens go on with 1. Behind it five tokens match, which is claimed to be right more often.
    assert tree.scores == pytest.approx((0.55, 0.55 * 0.65 * 3 / 4, 0.55 * 0.65 / 4))
    assert len(hit_tree([], "r")) == 0
    session = Retrieval().open(opening([1]))
    session.found(hits)
    assert paths(session.draft(2)) == [(1,), (1, 2)]
    session.observe(report(9))
    assert len(session.draft(2)) == 0
