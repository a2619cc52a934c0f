"""A pass is cut where states are kept: every row steps once, in its place, and after what it follows."""

from __future__ import annotations

from services.verifier.recurrence.cuts import cut
from services.verifier.recurrence.order import Line


def test_where_nothing_is_kept_in_mid_line_a_pass_is_one_part() -> None:
    first = Line(slot=0, accepted=2, chain=1, parents=(-1, 0), saved=[(3, 9)])
    second = Line(slot=1, accepted=0, chain=4, parents=())
    (part,) = cut([first, second], 2)
    assert [(line.slot, line.accepted, line.chain, line.parents, line.saved) for line in part.lines] == [
        (0, 2, 1, (-1, 0), [(3, 9)]), (1, 0, 4, (), [])
    ]  # fmt: skip
    assert (part.padding, part.rows) == (2, list(range(2 + 3 + 4 + 2)))


def test_lines_are_cut_behind_rows_whose_state_is_kept() -> None:
    first = Line(slot=0, accepted=2, chain=3, parents=(-1, 0), saved=[(1, 7), (4, 8)])
    second = Line(slot=1, accepted=1, chain=2, parents=(-1,), saved=[(2, 9)])
    third = Line(slot=2, accepted=0, chain=1, parents=())
    # Accepted rows 0 to 2; the first request's own from 3 on, the second's from 8, the third's 11; padding 12.
    one, two, three = cut([first, second, third], 1)
    assert [(line.slot, line.accepted, line.chain, line.parents, line.saved) for line in one.lines] == [
        (0, 1, 0, (), [(1, 7)]), (1, 1, 1, (), [(2, 9)]), (2, 0, 1, (), [])
    ]  # fmt: skip
    assert (one.rows, one.padding) == ([0, 2, 8, 11, 12], 1)
    assert [(line.slot, line.accepted, line.chain, line.parents, line.saved) for line in two.lines] == [
        (0, 1, 2, (), [(3, 8)]), (1, 0, 1, (-1,), [])
    ]  # fmt: skip
    assert (two.rows, two.padding) == ([1, 3, 4, 9, 10], 0)
    assert [(line.slot, line.accepted, line.chain, line.parents, line.saved) for line in three.lines] == [
        (0, 0, 1, (-1, 0), [])
    ]  # fmt: skip
    assert three.rows == [5, 6, 7]
