"""The hidden states that drafters read: those that are missing, late, of other layers, or outside of the window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.sessions.known_states import KnownStates
from tests.drafters.feature_sources import (
    EAGLE,
    EAGLE3,
    HEADS,
    SIZE,
    counted,
    draft,
    fresh,
    known,
    opening,
    report,
    same,
    source,
    states,
    text,
)


def test_nothing_is_drafted_while_the_target_reads_the_prompt() -> None:
    own = source()
    passes = counted(own)
    session, held = own.open(opening(text(12))), known()
    assert draft(own, session, held) is None
    held.add(states(range(5)))
    assert draft(own, session, held) is None and not passes
    # The prompt's states come before the first step's report, which brings the last one.
    held.add(states(range(5, 11)))
    report(session, [7])
    held.add(states(range(11, 12)))
    same(draft(own, session, held), fresh(own, [*text(12), 7], known(range(12))))
    assert passes[0] == 12


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_states_that_never_come_and_states_that_come_late(config: HeadConfig) -> None:
    own, tokens = source(config), text(20)
    blank = KnownStates()
    data = own._missing.numpy().astype("<f4").tobytes()
    for position in (*range(6), 13):
        blank.add(replace(states(range(position, position + 1), config), data=data, dtype="float32"))
    for chunk in (range(6, 13), range(14, 18)):
        blank.add(states(chunk, config))
    some = known(range(6, 13), range(14, 18), config=config)
    session = own.open(opening(tokens[:19]))
    masked = draft(own, session, some)
    same(masked, fresh(own, tokens[:19], blank))
    assert masked != fresh(own, tokens[:19], known(range(18), config=config))
    # They come after all, some of them with the next step: exactly the rows that came late are computed once more.
    passes = counted(own)
    some.add(states(range(2, 6), config))
    some.add(states(range(13, 14), config))
    some.add(states(range(18, 19), config))
    report(session, tokens[19:])
    late = draft(own, session, some)
    assert passes[0] == 4 + 1 + 1
    same(late, fresh(own, tokens, some))
    some.add(states(range(2), config))
    same(draft(own, session, some), fresh(own, tokens, known(range(19), config=config)))


def test_layers_are_picked_by_name_and_in_order() -> None:
    """More layers may arrive than the head reads, in another order; rows without them count as missing."""
    config = replace(EAGLE3, state_layers=(1, -1, 0))
    own, tokens = source(config), text(6)
    rows = np.random.default_rng(0).normal(size=(5, 4, SIZE)).astype("<f2")
    held, right, none = KnownStates(), KnownStates(), KnownStates()
    shape = states(range(5), config)
    held.add(replace(shape, data=rows.tobytes(), width=4 * SIZE, layers=(-1, 0, 7, 1)))
    right.add(replace(shape, data=rows[:, [3, 0, 1]].tobytes()))
    none.add(replace(shape, data=rows[:, :2].tobytes(), width=2 * SIZE, layers=(-1, 0)))
    same(fresh(own, tokens, held), fresh(own, tokens, right))
    session = own.open(opening(tokens))
    report(session, [3])
    assert draft(own, session, none) == draft(own, session, KnownStates())
    wide = known(range(5), config=replace(config, target_hidden_size=2 * SIZE))
    with pytest.raises(ValueError, match="64 numbers per layer: the head reads 32"):
        fresh(own, tokens, wide)


def test_the_window_is_all_that_is_read() -> None:
    window = 10
    own, tokens = source(window=window), text(30)
    tree = fresh(own, tokens, known(range(29)))
    others = [*text(19, seed=5), *tokens[19:]]
    mixed = known(range(19), seed=5)
    mixed.add(states(range(19, 29)))
    same(tree, fresh(own, others, mixed))
    assert tree != fresh(source(window=window + 1), tokens, known(range(29)))
    # A head's own window counts, too, and so does the context that it was trained for.
    for narrow in (replace(EAGLE, window=window), replace(EAGLE, max_positions=window)):
        same(tree, fresh(source(narrow), tokens, known(range(29))))


def test_what_is_noted_of_rows_without_a_state_goes_with_the_rows() -> None:
    own, tokens = source(), text(30)
    session, held = own.open(opening(tokens)), known(range(10, 29))
    for _ in range(3):
        same(draft(own, session, held), fresh(own, tokens, held))
        assert session._without == list(range(10))
        # As when other sessions need the room.
        session.cache.clear()
