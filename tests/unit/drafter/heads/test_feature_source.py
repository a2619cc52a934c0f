"""Drafters of hidden states as sources: caches that are rolled back exactly, batches, bounds, failures."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.sessions.thread import use_threads
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import DraftNoise
from speculation.tree import depths
from speculation.types import EMPTY_TREE
from tests.drafters.feature_sources import (
    HEADS,
    VOCABULARY,
    counted,
    draft,
    fresh,
    known,
    opening,
    report,
    same,
    source,
    text,
)


@pytest.mark.examples(4)
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", [1000, 9])
def test_step_by_step_as_if_opened_anew(config: HeadConfig, window: int) -> None:
    """Whatever was drafted before leaves no trace, and true states replace the head's own."""
    own = source(config, window=window)
    tokens = text(40)
    session = own.open(opening(tokens[:8], prompt_length=1))
    length, drafts = 8, set()
    for count in (1, 3, 1, 2, 5, 4, 1, 12, 1):
        held = known(range(length - 1), config=config)
        tree = draft(own, session, held)
        assert len(tree) == 12 and max(depths(tree)) > 2
        same(tree, fresh(own, tokens[:length], held))
        # A second time: the same.
        same(tree, draft(own, session, held))
        drafts.add(tree.tokens)
        report(session, tokens[length : length + count])
        length += count
    assert len(drafts) == 9


def test_sixteen_sessions_as_one_by_one() -> None:
    """Texts of different lengths, greedy, with noise and drawn, some with states missing, in one batch."""
    own = source(ids=range(0, VOCABULARY, 2))
    wanted, alone = [], []
    for number in range(16):
        held = known(range(number % 5, 3 + number), seed=number)
        fields: dict[str, Any] = {"prompt_length": 2 + number % 3}
        if number % 3 == 1:
            fields |= {"temperature": 0.7, "noise": DraftNoise(seed=number, top_k=20 * (number % 2))}
        message = opening(text(4 + number, seed=number), **fields)
        nodes = 1 + 2 * number
        wanted.append(DraftWanted(session=own.open(message), max_nodes=nodes, states=held))
        alone.append(draft(own, own.open(message), held, nodes))
    for _ in range(2):
        for one, other, each in zip(own.draft(wanted), alone, wanted, strict=True):
            same(one, other)
            assert len(one) == each.max_nodes
    assert len({tree.tokens for tree in alone}) == 16
    # Nothing is wanted of one, and nothing can be said about another.
    trees = own.draft(
        [replace(wanted[0], max_nodes=0), DraftWanted(session=own.open(opening([1])), max_nodes=3, states=known())]
    )
    assert trees == [EMPTY_TREE, None]


def test_a_cache_is_moved_and_grows_without_a_trace() -> None:
    own = source(window=300)
    tokens = text(1500)
    session = own.open(opening(tokens[:250], prompt_length=1))
    for length in range(250, 1500, 25):
        tree = draft(own, session, known(range(max(0, length - 320), length - 1)))
        if length % 200 == 0:
            same(tree, fresh(own, tokens[:length], known(range(max(0, length - 320), length - 1))))
            assert session.cache.nbytes < 4 * (300 + 256 + 40) * 2 * 2 * 8 * 8
        report(session, tokens[length : length + 25])


def test_long_texts_are_read_in_pieces_beside_others() -> None:
    own = source(window=4000)
    passes = counted(own)
    tokens = text(2000)
    long = DraftWanted(session=own.open(opening(tokens)), max_nodes=5, states=known(range(1999)))
    short = DraftWanted(session=own.open(opening(tokens[:9])), max_nodes=5, states=known(range(8)))
    trees = own.draft([long, short])
    assert trees[0] is None and passes[0] == 8 + 256
    same(trees[1], fresh(own, tokens[:9], known(range(8)), 5))
    passes.clear()
    first, second = own.draft([long])[0], own.draft([long])[0]
    assert first is None and len(second) == 5 and max(passes) == 1024


def test_caches_have_a_bound() -> None:
    free, bound = source(), source(most_bytes=60_000)
    sessions = [bound.open(opening(text(40, seed=number))) for number in range(6)]
    for _ in range(2):
        for number, session in enumerate(sessions):
            held = known(range(39), seed=number)
            same(draft(bound, session, held), fresh(free, text(40, seed=number), held))
            assert sum(each.cache.nbytes for each in sessions) <= 60_000
    assert sum(each.cache.nbytes > 0 for each in sessions) < 6


def test_after_a_failure_drafts_are_right_again() -> None:
    own, tokens, held = source(), text(16), known(range(15))
    session = own.open(opening(tokens[:10]))
    draft(own, session, known(range(9)))
    report(session, tokens[10:])
    for failing in (1, 2, 3):
        passes = counted(own)

        def fail(module: object, given: object, passes: list[int] = passes, failing: int = failing) -> None:
            if len(passes) == failing:
                raise RuntimeError("planted failure")

        hook = own._head.register_forward_hook(lambda module, given, made: fail(module, given))
        with pytest.raises(RuntimeError, match="planted"):
            draft(own, session, held)
        hook.remove()
    same(draft(own, session, held), fresh(own, tokens, held))


def test_nothing_of_a_text_remains() -> None:
    own = source(ids=range(0, VOCABULARY, 2))
    session = own.open(opening(text(16), temperature=1.0, noise=DraftNoise(seed=1)))
    draft(own, session, known(range(15)))
    session.close()
    own.forget("t")
    assert not session.tokens and not session.cache.nbytes and session.extra is None and session.noise is None
    assert draft(own, session, known(range(15))) is None


def test_threads_of_a_head_are_its_own() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def other_thread() -> None:
        seen.append(torch.get_num_threads())

    def head_thread() -> None:
        use_threads(seen[0] + 1)
        other_thread()

    # What a new thread gets is the process's own number, which need not be this thread's.
    for work in (other_thread, head_thread, other_thread):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [seen[0], seen[0] + 1, seen[0]]
    assert torch.get_num_threads() == before
