"""The verdict of ``outrider bench never-slower`` on made-up turns: planted slow cells are found, noise is not."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from benchmarks.never_slower.cells import PLAIN, GridCell, LoadTurn
from benchmarks.never_slower.report import all_tables, verdict_line
from benchmarks.never_slower.verdict import NeverSlowerVerdict, judge, plain_stray, slowest_second

CELL = GridCell(on="process", at_once=8, kind="open", temperature=0.0, length="short")


def a_round(*speeds: tuple[str, float], cell: GridCell = CELL, repeat: int = 0, seconds: int = 6) -> list[LoadTurn]:
    """A round of contestants that make so many tokens per second, evenly."""
    turns = []
    for place, (name, speed) in enumerate(speeds):
        plain = [other for at, (base, other) in enumerate(speeds) if base == PLAIN and at != place]
        turns.append(
            LoadTurn(
                cell=cell,
                repeat=repeat,
                turn=place,
                strategy=name,
                seconds=float(seconds),
                tenths=(round(speed / 10),) * (10 * seconds),
                shared=10 * seconds,
                work_s=1000 / speed if speed else 0.0,
                plain_work_s=sum(1000 / other for other in plain if other) / len(plain),
                ttft_s=0.2,
                answers=9,
            )
        )
    return turns


def rounds(
    ratio: float, cell: GridCell = CELL, stray: float = 0.005, repeats: int = 3, seed: int = 1, strategy: str = "auto"
) -> list[LoadTurn]:
    """Whole rounds in which the strategy makes ``ratio`` of plain decoding, and every turn strays."""
    dice = Random(f"{seed}/{cell}")
    return [
        one
        for repeat in range(repeats)
        for one in a_round(
            *(
                (name, 10000 * speed * dice.gauss(1, stray))
                for name, speed in ((PLAIN, 1.0), (strategy, ratio), (PLAIN, 1.0))
            ),
            cell=cell,
            repeat=repeat,
        )
    ]


def a_grid() -> list[GridCell]:
    return [
        replace(CELL, at_once=at_once, kind=kind, temperature=temperature)
        for at_once in (1, 8, 24)
        for kind in ("open", "json", "mixed")
        for temperature in (0.0, 1.0)
    ]


def with_pause(one: LoadTurn, share: float, at: int = 23) -> LoadTurn:
    """The turn with one second in which only ``share`` of its tokens come; the others come afterwards."""
    tenths = list(one.tenths)
    for place in range(at, at + 10):
        lost = round(tenths[place] * (1 - share))
        tenths[place] -= lost
        tenths[place + 12] += lost
    return replace(one, tenths=tuple(tenths))


def test_a_planted_slow_cell_comes_first_and_breaks_the_verdict() -> None:
    slow = replace(CELL, at_once=24, kind="json")
    turns = [one for cell in a_grid() for one in rounds(0.9 if cell == slow else 1.15, cell)]
    verdict = judge(turns)
    assert verdict.word == "no"
    assert [cell.cell for cell in verdict.cells if cell.bad] == [slow]
    assert verdict.cells[0].cell == slow
    assert verdict.cells[0].state == "NO: slower"
    assert verdict.cells[0].ratio == pytest.approx(0.9, abs=0.02)
    assert "NO: 1 of 18 cells" in verdict_line(verdict)
    table = all_tables({"left_out": {}}, verdict)[0]
    assert table.rows[0][:2] == (f"auto, {slow}", "NO: slower")


@pytest.mark.parametrize("seed", range(20))
def test_equal_speeds_are_not_called_slower(seed: int) -> None:
    verdict = judge([one for cell in a_grid() for one in rounds(1.0, cell, stray=0.01, seed=seed)])
    assert [cell.state for cell in verdict.cells if cell.bad] == []


def test_a_slow_second_is_found_though_the_mean_is_fast() -> None:
    turns = rounds(1.05)
    assert judge(turns).word == "yes"
    turns[4] = with_pause(turns[4], 0.5)
    verdict = judge(turns)
    assert verdict.cells[0].state == "NO: slow second"
    assert verdict.cells[0].slowest_second == pytest.approx(0.525, abs=0.03)
    assert verdict.cells[0].plain_slowest_second == pytest.approx(1, abs=0.03)


def test_seconds_in_which_plain_decoding_pauses_too_are_not_slow() -> None:
    turns = [with_pause(one, 0.7, at=20 + one.repeat) for one in rounds(1.0)]
    assert judge(turns).word == "yes"


def test_seconds_are_not_judged_where_kinds_change_or_plain_decoding_halts() -> None:
    changing = [
        with_pause(one, 0.5) if one.strategy != PLAIN else one for one in rounds(1.0, replace(CELL, kind="changing"))
    ]
    halting = [with_pause(one, 0.1) for one in rounds(1.0, replace(CELL, kind="code"))]
    verdict = judge([*changing, *halting])
    assert verdict.word == "yes"
    assert all(math.isnan(cell.second_bound) for cell in verdict.cells)


def test_what_lies_within_the_noise_is_unclear() -> None:
    noisy = judge([one for n in range(3) for one in a_round((PLAIN, 11000), ("auto", 9700), (PLAIN, 9000), repeat=n)])
    assert noisy.word == "unclear"
    assert noisy.cells[0].state == "unclear: noise"
    # Two equal turns differ by 3 %, and the ratio is 0.97: nobody can tell.
    near = judge([one for n in range(3) for one in a_round((PLAIN, 10150), ("auto", 9700), (PLAIN, 9850), repeat=n)])
    assert near.cells[0].noise == pytest.approx(2 * 0.03 / math.sqrt(2) * math.sqrt(0.5), rel=0.01)
    assert near.cells[0].state == "unclear: within noise"


def test_a_cell_whose_equal_turns_agree_by_luck_has_the_noise_of_the_others() -> None:
    lucky = rounds(0.97, stray=0.0)
    others = [one for cell in a_grid() if cell != CELL for one in rounds(1.1, cell, stray=0.02)]
    assert plain_stray([lucky[:3], lucky[3:6]]) == 0
    alone = judge(lucky).cells[0]
    among = next(cell for cell in judge([*lucky, *others]).cells if cell.cell == CELL)
    assert (alone.noise, alone.state) == (0, "NO: slower")
    assert among.noise > 0.01
    assert among.state == "unclear: within noise"


def test_wrong_tokens_break_the_verdict_where_equal_ones_are_promised() -> None:
    turns = rounds(1.2)
    turns[1] = replace(turns[1], wrong=("open/1, seed 1, token 3: 4 instead of 5",))
    verdict = judge(turns)
    assert (verdict.word, verdict.cells[0].state) == ("no", "NO: wrong token")
    assert all_tables({"left_out": {}}, verdict)[-1].rows == ((str(CELL), turns[1].wrong[0]),)
    assert judge(turns, exact=False).word == "yes"
    # Two plain runs that differ are as bad.
    assert judge([*rounds(1.2)[:2], replace(rounds(1.2)[2], wrong=turns[1].wrong)]).word == "no"


def test_failures_and_silence_are_told() -> None:
    turns = rounds(1.2)
    failed = judge([*turns[:-2], replace(turns[-2], tenths=(), seconds=0.0, error="the verifier is gone"), turns[-1]])
    assert (failed.word, failed.cells[0].state) == ("no", "failed: the verifier is gone")
    silent = judge([replace(one, tenths=(0,) * 60, work_s=0.0, plain_work_s=0.0) for one in turns])
    assert silent.word == "unclear"
    assert math.isnan(silent.cells[0].ratio)
    assert judge([]) == NeverSlowerVerdict(cells=(), means={})
    assert verdict_line(judge([])) == "Never slower: unclear: nothing was measured."


def test_a_strategy_without_a_token_is_slower() -> None:
    turns = [one for n in range(3) for one in a_round((PLAIN, 1000), ("auto", 0), (PLAIN, 1000), repeat=n)]
    assert judge(turns).cells[0].state == "NO: slower"


def test_the_goal_counts_cells_of_up_to_eight_at_once() -> None:
    turns = [one for cell in a_grid() for one in rounds(1.3 if cell.at_once <= 8 else 1.0, cell)]
    verdict = judge([*turns, *(one for cell in a_grid() for one in rounds(1.0, cell, strategy="blend"))])
    assert verdict.means["auto"] == pytest.approx(1.3, abs=0.02)
    assert "auto 1.30 (reached), blend 1.00 (not reached)" in verdict_line(verdict)
    assert verdict_line(judge(rounds(1.0, replace(CELL, at_once=64)))).endswith("slower than plain decoding.")


def test_every_second_is_looked_at_tenth_by_tenth() -> None:
    one = a_round((PLAIN, 100), (PLAIN, 100))[0]
    assert slowest_second(one) == 100
    assert slowest_second(replace(one, tenths=(10,) * 13 + (0,) * 10 + (10,) * 37)) == 0
    # What comes of prompts that plain decoding never reached says nothing.
    assert slowest_second(replace(one, tenths=(10,) * 30 + (0,) * 30, shared=30)) == 100
    assert math.isnan(slowest_second(replace(one, shared=9)))
